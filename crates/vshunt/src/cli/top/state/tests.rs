use super::super::view::tests::samples;
use super::*;

fn key(state: &mut State, view: &View, code: KeyCode) -> Action {
    state.on_key(KeyEvent::new(code, KeyModifiers::NONE), view)
}

fn typed(state: &mut State, view: &View, text: &str) {
    for c in text.chars() {
        assert_eq!(key(state, view, KeyCode::Char(c)), Action::Nothing, "{c}");
    }
}

fn start() -> (State, View) {
    let (before, now) = samples();
    let (mut state, mut view) = (State::new(true), View::between(&before, &now));
    state.arrange(&mut view);
    (state, view)
}

#[test]
fn a_queue_is_moved_by_keys() {
    let (mut state, view) = start();
    key(&mut state, &view, KeyCode::Down);
    typed(&mut state, &view, "mq5");
    key(&mut state, &view, KeyCode::Backspace);
    typed(&mut state, &view, "1");
    let queues = QueueNames { export: "vm0".into(), indices: Some(1..=1) };
    assert_eq!(key(&mut state, &view, KeyCode::Enter), Action::Move { queues, worker: "q1".into() });
    assert_eq!(state.mode, Mode::Command);
}

#[test]
fn all_queues_of_an_export_are_moved_by_keys() {
    let (mut state, view) = start();
    key(&mut state, &view, KeyCode::BackTab);
    key(&mut state, &view, KeyCode::End);
    state.arrange(&mut view.clone());
    typed(&mut state, &view, "m1");
    let queues = QueueNames { export: "vm1".into(), indices: None };
    assert_eq!(key(&mut state, &view, KeyCode::Enter), Action::Move { queues, worker: "1".into() });
}

#[test]
fn a_move_can_be_given_up_and_needs_a_queue() {
    let (mut state, view) = start();
    typed(&mut state, &view, "m1");
    assert_eq!(key(&mut state, &view, KeyCode::Esc), Action::Nothing);
    assert_eq!(state.mode, Mode::Command);
    typed(&mut state, &view, "m");
    assert_eq!(key(&mut state, &view, KeyCode::Enter), Action::Nothing, "no worker was typed");
    key(&mut state, &view, KeyCode::Tab);
    typed(&mut state, &view, "m");
    assert_eq!(state.mode, Mode::Command);
    assert!(state.message().is_some_and(|text| text.contains("select a queue")));
}

#[test]
fn keys_of_a_filter_are_no_commands() {
    let (mut state, view) = start();
    typed(&mut state, &view, "/vmq");
    key(&mut state, &view, KeyCode::Backspace);
    key(&mut state, &view, KeyCode::Enter);
    assert_eq!(state.filter, "vm");
    assert_eq!(key(&mut state, &view, KeyCode::Esc), Action::Nothing, "ends the filter");
    assert_eq!(state.filter, "");
    assert_eq!(key(&mut state, &view, KeyCode::Esc), Action::Quit);
    assert_eq!(key(&mut state, &view, KeyCode::Char('q')), Action::Quit);
}

#[test]
fn keys_sort_reverse_and_pause() {
    let (mut state, mut view) = start();
    let mut orders = vec![state.order];
    for _ in 0..3 {
        typed(&mut state, &view, "s");
        orders.push(state.order);
    }
    assert_eq!(orders, [Order::Name, Order::Requests, Order::Bytes, Order::Name]);
    typed(&mut state, &view, "r");
    state.arrange(&mut view);
    assert_eq!(view.queues[0].name(), "vm1:0");
    typed(&mut state, &view, "r ");
    assert_eq!((state.reverse, state.is_paused()), (false, true));
    typed(&mut state, &view, " ");
    assert!(!state.is_paused());
}

#[test]
fn control_c_quits_in_each_mode() {
    for before in ["", "/", "m", "?"] {
        let (mut state, view) = start();
        typed(&mut state, &view, before);
        let quit = state.on_key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL), &view);
        assert_eq!(quit, Action::Quit, "after `{before}`");
    }
}

#[test]
fn a_selection_stays_within_a_table_that_became_shorter() {
    let (mut state, mut view) = start();
    key(&mut state, &view, KeyCode::End);
    state.arrange(&mut view);
    assert_eq!(state.table(Focus::Queues).selected(), Some(2));
    view.queues.truncate(1);
    state.arrange(&mut view);
    assert_eq!(state.table(Focus::Queues).selected(), Some(0));
    view.queues.clear();
    state.arrange(&mut view);
    assert_eq!(state.table(Focus::Queues).selected(), None);
    typed(&mut state, &view, "m");
    assert_eq!(state.mode, Mode::Command);
}
