//! Indices of queues, verified with a steering program that selects one.

use std::os::fd::AsRawFd;

use super::*;

/// Checks that each index leads to the queue of [`Tap::order`].
fn holds(tap: &Tap, queues: &[Arc<TapQueue>], want: &[usize]) {
    let order = tap.order();
    assert_eq!(order, want);
    for (number, queue) in queues.iter().enumerate() {
        assert_eq!(queue.index().map(usize::from), order.iter().position(|at| *at == number));
        while receive(queue).is_some() {}
    }
    for (index, number) in order.iter().enumerate() {
        let program = crate::steering::load_constant(index as u16).unwrap();
        ifreq::set_int(&*queues[0], ifreq::TUNSETSTEERINGEBPF, program.as_raw_fd()).unwrap();
        let frame = frame(60 + index);
        send("vs0", &frame).unwrap();
        wait_until("the frame", || receive(&queues[*number]).is_some_and(|got| got[10..] == frame));
    }
}

#[test]
fn it_follows_the_kernels() {
    in_new_namespace(|| {
        let tap = Tap::open("vs0", 4).unwrap();
        let queues = tap.queues(4).unwrap();
        holds(&tap, &queues, &[]);
        for number in [2, 0, 1, 3] {
            queues[number].attach().unwrap();
        }
        holds(&tap, &queues, &[2, 0, 1, 3]);
        queues[2].detach().unwrap();
        holds(&tap, &queues, &[3, 0, 1]);
        queues[1].detach().unwrap();
        queues[1].detach().unwrap();
        holds(&tap, &queues, &[3, 0]);
        // A queue that is opened later is attached and detached as the last one.
        let queues = tap.queues(5).unwrap();
        holds(&tap, &queues, &[3, 0]);
        for number in [2, 4] {
            queues[number].attach().unwrap();
        }
        holds(&tap, &queues, &[3, 0, 2, 4]);
        queues[3].detach().unwrap();
        holds(&tap, &queues, &[4, 0, 2]);
        queues.iter().for_each(|queue| queue.detach().unwrap());
        holds(&tap, &queues, &[]);
    });
}

#[test]
fn it_holds_with_several_who_change_it() {
    in_new_namespace(|| {
        let tap = Tap::open("vs0", 1).unwrap();
        let first = tap.queues(1).unwrap().remove(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..50 {
                    first.attach().unwrap();
                    first.detach().unwrap();
                }
                first.attach().unwrap();
            });
            for count in 2..=8 {
                let queues = tap.queues(count).unwrap();
                queues[usize::from(count) - 1].attach().unwrap();
            }
        });
        let order = tap.order();
        assert_eq!(order.len(), 8);
        holds(&tap, &tap.queues(8).unwrap(), &order);
    });
}
