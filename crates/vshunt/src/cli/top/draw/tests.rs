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
        "vshunt top: 600 req/s, 2.34M/s read, 0/s written, 150 % CPU; by name",
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
    assert!(lines[23].starts_with("Tab table"), "{lines:#?}");
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
