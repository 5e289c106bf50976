use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::view::tests::{queue, sample, samples, worker};
use super::*;

/// Returns the lines of a screen, without spaces at their ends.
fn screen(width: u16, height: u16, view: &View, state: &mut State) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, view, state)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..height).map(line).collect()
}

fn view(state: &mut State) -> View {
    let (before, now) = samples();
    let mut view = View::between(&before, &now);
    state.arrange(&mut view);
    view
}

#[test]
fn all_tables_fit_a_small_terminal() {
    let mut state = State::new(true);
    let view = view(&mut state);
    let lines = screen(80, 24, &view, &mut state);
    let want = [
        "vshunt top: by name; 600 req/s, 2.34M/s read, 0/s written, 150 % CPU",
        "EXPORT TYPE           BACKEND STATE     IN-FLIGHT REQ/s READ/s WRITTEN/s    P99",
        "vm0    vhost-user-blk d0      connected         4   500  1.95M         0 1.00ms",
        "vm1    vhost-user-blk d0      connected         2   100   400K         0 24.0us",
        "",
        "QUEUE WORKER STATE   IN-FLIGHT REQ/s READ/s WRITTEN/s ERR/s LIM%    P50    P99",
        "vm0:0      0 running         2     0      0         0     0    -      -      -",
        "vm0:1      1 running         2   500  1.95M         0     0    - 24.0us 1.00ms",
        "vm1:0      0 running         2   100   400K         0     0    - 24.0us 24.0us",
        "",
        "WORKER NAME     CPUS            BUSY% POLL% CPU% NOTE REQ/s SLEEPS/s QUEUES",
        "     0 worker-0 0-1  ||||:.....  40.0    10   50 -        0        0 vm0:0,vm1:0",
        "     1 worker-1 0-1  ||||||||||  95.0     5  100 hot      0        0 vm0:1",
    ];
    assert_eq!(lines[..want.len()], want);
    assert_eq!(lines[23], ALL_KEYS);
}

const ALL_KEYS: &str = "Tab table  ↑↓ row  m move  s, r sort  / filter  space pause  ? help  q quit";

#[test]
fn a_long_list_of_queues_takes_nothing_from_names_and_bars() {
    let at = std::time::Instant::now();
    let queues = |n: u64| {
        let of = |export, count| (0..count).map(move |index| queue(export, index, 0, n));
        of("vm0", 4).chain(of("vm1", 3)).collect::<Vec<_>>()
    };
    let names = ["vm0:0", "vm0:1", "vm0:2", "vm0:3", "vm1:0", "vm1:1", "vm1:2"];
    let before = sample(at, queues(0), vec![worker(0, 0, &names)]);
    let later = at + std::time::Duration::from_secs(2);
    let now = sample(later, queues(100_000), vec![worker(0, 384_000, &names)]);
    let mut state = State::new(true);
    let mut view = View::between(&before, &now);
    state.arrange(&mut view);
    let lines = screen(80, 24, &view, &mut state);
    let row = |lines: &[String]| lines.iter().find(|line| line.contains(" ||........ ")).unwrap().clone();
    assert_eq!(
        row(&lines),
        "     0 worker-0 0-1  ||........  19.2     5   24 -        0        0 vm0:0-3,vm…",
    );
    assert_eq!(lines[23], ALL_KEYS);
    // As above, with an export whose queues do not fit.
    view.workers[0].queues.extend((0..9).map(|index| format!("vm-production:{index}")));
    view.workers[0].stalled = true;
    assert_eq!(
        row(&screen(80, 24, &view, &mut state)),
        "     0 worker-0 0-1  ||........  19.2     5   24 stalled     0        0 vm0:0-3…",
    );
    view.workers[0].name = "worker-of-the-database".into();
    assert_eq!(
        row(&screen(80, 24, &view, &mut state)),
        "     0 worker-o…database 0-1  ||........  19.2     5   24 stalled     0 vm0:0-3…",
    );
}

#[test]
fn long_names_keep_their_ends_and_rates() {
    let at = std::time::Instant::now();
    let name = "vm-of-the-production-01";
    let now = sample(at, vec![queue(name, 3, 0, 1)], vec![worker(0, 0, &[])]);
    let mut state = State::new(true);
    let mut view = View::between(&now, &now);
    state.arrange(&mut view);
    let lines = screen(80, 24, &view, &mut state);
    let want = [
        "EXPORT                  BACKEND STATE     IN-FLIGHT REQ/s READ/s WRITTEN/s P99",
        "vm-of-the-production-01 d0      connected         2     0      0         0   -",
        "",
        "QUEUE             WORKER STATE   IN-FLIGHT REQ/s READ/s WRITTEN/s ERR/s LIM% P99",
        "vm-of-th…ion-01:3      0 running         2     0      0         0     0    -   -",
    ];
    assert_eq!(lines[1..6], want);
}

#[test]
fn the_keys_fit_and_quitting_is_always_among_them() {
    assert_eq!(keys(200), ALL_KEYS);
    for width in 14..120 {
        let keys = keys(width);
        assert!(keys.chars().count() <= usize::from(width), "{width}: {keys}");
        assert!(keys.ends_with("? help  q quit"), "{width}: {keys}");
    }
}

#[test]
fn the_first_line_begins_with_what_the_user_set() {
    let mut state = State::new(true);
    let view = view(&mut state);
    let first = |state: &mut State| screen(80, 24, &view, state).swap_remove(0);
    let press = |state: &mut State, keys: &str| {
        for c in keys.chars() {
            let code = ratatui::crossterm::event::KeyCode::Char(c);
            state.on_key(code.into(), &view);
        }
    };
    press(&mut state, "sr ");
    let want = "vshunt top: paused; by requests, reversed; 600 req/s, 2.34M/s read, 0/s written…";
    assert_eq!(first(&mut state), want);
    press(&mut state, "s/vm-of-the-production-01:3-to-7");
    let want = "vshunt top: paused; filter vm-of-the-production-01…; by bytes, busy, reversed; …";
    assert_eq!(first(&mut state), want);
}

#[test]
fn many_queues_scroll_and_leave_room_for_the_other_tables() {
    let at = std::time::Instant::now();
    let queues: Vec<_> = (0..100).map(|n| queue("vm0", n, 0, 1)).collect();
    let now = sample(at, queues, (0..50).map(|n| worker(n, 0, &[])).collect());
    let mut state = State::new(false);
    let mut view = View::between(&now, &now);
    state.arrange(&mut view);
    state.table(Focus::Queues).select(Some(99));
    let lines = screen(80, 24, &view, &mut state);
    for text in ["EXPORT", "vm0 ", "QUEUE", "vm0:99", "WORKER", "worker-0"] {
        assert!(lines.iter().any(|line| line.contains(text)), "{text} in {lines:#?}");
    }
}

#[test]
fn any_size_of_terminal_is_drawn() {
    let mut state = State::new(false);
    let view = view(&mut state);
    for mode in [Mode::Command, Mode::Filter, Mode::Help] {
        state.mode = mode;
        for (width, height) in [(1, 1), (10, 2), (20, 5), (40, 10), (300, 100)] {
            screen(width, height, &view, &mut state);
            screen(width, height, &View::default(), &mut state);
        }
    }
}

#[test]
fn the_last_line_asks_and_tells() {
    let mut state = State::new(true);
    let view = view(&mut state);
    let last = |state: &mut State| screen(80, 24, &view, state).pop().unwrap();
    state.say("vm0:0 is on worker 1\x1b[2J".into());
    assert_eq!(last(&mut state), "vm0:0 is on worker 1\\u{1b}[2J");
    state.set_lost(Some("no vshunt answers".into()));
    assert_eq!(last(&mut state), "trying again: no vshunt answers");
    let queues = crate::values::parse_queues("vm0:0-1").unwrap();
    state.mode = Mode::Move { queues, worker: "fa".into() };
    assert_eq!(last(&mut state), "move vm0:0-1 to worker (id or name): fa_");
}
