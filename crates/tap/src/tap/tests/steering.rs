//! Flows as hosts send them, and the queues at which they arrive.

use std::collections::BTreeMap;
use std::net::UdpSocket;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::*;

const QUEUES: u16 = 4;
const FLOWS: u16 = 64;
/// Identifies a frame of these tests among the host's own frames.
const MARK: &[u8] = b"vshunt, a test frame";

/// The kind of a flow, in addition to the number of its source port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    V4,
    /// With options, which move the ports.
    V4Options,
    V4Tagged,
    V6,
}

const SHAPES: [Shape; 4] = [Shape::V4, Shape::V4Options, Shape::V4Tagged, Shape::V6];

/// Makes a frame of flow `flow`, or of its other direction. `protocol` is the number of UDP or TCP.
fn packet(shape: Shape, protocol: u8, flow: u16, back: bool) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    if shape == Shape::V4Tagged {
        frame.extend([0x81, 0x00, 0x00, 0x07]);
    }
    // Alternately servers 0 and 1, and a client for each few flows, because addresses count, too.
    let (one, other) = ([10, 9, 0, (flow / 8) as u8], [10, 9, 1, (flow % 2) as u8]);
    let (from, to) = if back { (other, one) } else { (one, other) };
    match shape {
        Shape::V6 => {
            frame.extend([0x86, 0xDD, 0x60, 0, 0, 0, 0, 64, protocol, 64]);
            for end in [from, to] {
                frame.extend([0x20, 1, 0xD, 0xB8, 0, 0, 0, 0, 0, 0, 0, 0]);
                frame.extend(end);
            }
        }
        _ => {
            let words = if shape == Shape::V4Options { 7 } else { 5 };
            frame.extend([8, 0, 0x40 | words, 0, 0, 84, flow as u8, 0, 0x40, 0, 64, protocol, 0, 0]);
            frame.extend(from);
            frame.extend(to);
            frame.extend(std::iter::repeat_n(1, 4 * usize::from(words - 5)));
        }
    }
    let (one, other) = ((1000 + flow).to_be_bytes(), 80_u16.to_be_bytes());
    let (from, to) = if back { (other, one) } else { (one, other) };
    frame.extend(from);
    frame.extend(to);
    frame.extend(MARK);
    frame.resize(frame.len().max(60), 0);
    frame
}

/// Takes `count` frames of these tests out of the queues. Returns them with their queues.
fn take(queues: &[Arc<TapQueue>], count: usize) -> Vec<(usize, Vec<u8>)> {
    let mut taken = Vec::new();
    wait_until("the frames", || {
        for (number, queue) in queues.iter().enumerate() {
            while let Some(got) = receive(queue) {
                if got.windows(MARK.len()).any(|bytes| bytes == MARK) {
                    taken.push((number, got[HEADER_SHORT as usize..].to_vec()));
                }
            }
        }
        taken.len() >= count
    });
    taken
}

/// Returns the queue of each flow, and checks that all its frames arrived there.
fn queues_of_flows(queues: &[Arc<TapQueue>], shape: Shape, protocol: u8, back: bool) -> BTreeMap<u16, usize> {
    let frames: Vec<_> = (0..FLOWS).map(|flow| packet(shape, protocol, flow, back)).collect();
    let wire = Wire::new("vs0");
    for _ in 0..3 {
        frames.iter().for_each(|frame| wire.send(frame).unwrap());
    }
    let mut queue_of = BTreeMap::new();
    for (number, got) in take(queues, 3 * frames.len()) {
        let flow = frames.iter().position(|frame| *frame == got).expect("a frame that was sent") as u16;
        assert_eq!(*queue_of.entry(flow).or_insert(number), number, "{shape:?} flow {flow} stays");
    }
    queue_of
}

fn used(queue_of: &BTreeMap<u16, usize>) -> Vec<usize> {
    let mut used: Vec<usize> = queue_of.values().copied().collect();
    used.sort_unstable();
    used.dedup();
    used
}

fn attached(tap: &Tap) -> Vec<Arc<TapQueue>> {
    let queues = tap.queues(QUEUES).unwrap();
    queues.iter().for_each(|queue| queue.attach().unwrap());
    queues
}

fn steered(steering: Steering) -> Tap {
    Tap::open_with("vs0", QUEUES, &Options { steering, ..Options::default() }).unwrap()
}

#[test]
fn flows_stay_and_spread_and_both_directions_meet() {
    for steering in [Steering::Rss, Steering::Hash] {
        in_new_namespace(move || {
            let tap = steered(steering);
            assert_eq!(tap.steering(), steering);
            let queues = attached(&tap);
            for shape in SHAPES {
                for protocol in [6, 17] {
                    let there = queues_of_flows(&queues, shape, protocol, false);
                    assert_eq!(used(&there), [0, 1, 2, 3], "{steering} {shape:?}");
                    for queue in 0..4 {
                        let flows = there.values().filter(|queue_found| **queue_found == queue).count();
                        assert!((4..=36).contains(&flows), "{steering} {shape:?}: {flows} of 64 on {queue}");
                    }
                    assert_eq!(
                        queues_of_flows(&queues, shape, protocol, true),
                        there,
                        "{steering} {shape:?} back"
                    );
                }
            }
        });
    }
}

#[test]
fn nothing_comes_to_one_that_is_detached() {
    for steering in [Steering::Rss, Steering::Hash, Steering::Cpu] {
        in_new_namespace(move || {
            let tap = steered(steering);
            let queues = attached(&tap);
            for (number, left) in [(1, &[0, 2, 3][..]), (3, &[0, 2]), (0, &[2])] {
                queues[number].detach().unwrap();
                let used = used(&queues_of_frames(&queues));
                assert!(used.iter().all(|queue| left.contains(queue)), "{steering}: {used:?} of {left:?}");
                if steering != Steering::Cpu {
                    assert_eq!(used, left, "{steering}");
                }
            }
        });
    }
}

/// Returns the queue of each frame, one frame for each flow.
fn queues_of_frames(queues: &[Arc<TapQueue>]) -> BTreeMap<u16, usize> {
    let wire = Wire::new("vs0");
    (0..FLOWS).for_each(|flow| wire.send(&packet(Shape::V4, 17, flow, false)).unwrap());
    let taken = take(queues, FLOWS.into());
    (0..).zip(taken).map(|(at, (number, _))| (at, number)).collect()
}

#[test]
fn fragments_of_a_packet_stay_together() {
    in_new_namespace(|| {
        let tap = steered(Steering::Rss);
        let (queues, wire) = (attached(&tap), Wire::new("vs0"));
        let mut seen = BTreeMap::new();
        for flow in 0..FLOWS {
            // A fragment that is not the last, and the last one, which has data in place of ports.
            for (flags, ports) in [([0x20, 0], 1000 + flow), ([0, 9], 7 * flow)] {
                let mut frame = packet(Shape::V4, 17, flow, false);
                frame[20..22].copy_from_slice(&flags);
                frame[34..36].copy_from_slice(&ports.to_be_bytes());
                wire.send(&frame).unwrap();
                let queue_found = take(&queues, 1)[0].0;
                assert_eq!(
                    *seen.entry(frame[26..34].to_vec()).or_insert(queue_found),
                    queue_found,
                    "flow {flow}"
                );
            }
        }
    });
}

#[test]
fn what_has_no_ports_goes_by_addresses() {
    in_new_namespace(|| {
        let tap = steered(Steering::Rss);
        let (queues, wire) = (attached(&tap), Wire::new("vs0"));
        let mut queue_of = BTreeMap::new();
        for flow in 0..FLOWS {
            // A frame that is not IP uses the Ethernet addresses. One that is shorter than any
            // header goes to any queue.
            let mut frame = packet(Shape::V4, 17, flow, false);
            frame[12..14].copy_from_slice(&[0x88, 0xB5]);
            frame[11] = flow as u8;
            wire.send(&frame).unwrap();
            queue_of.insert(flow, take(&queues, 1)[0].0);
            frame.rotate_left(6);
            frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, flow as u8, 2, 0, 0, 0, 0, 1]);
            frame[12..14].copy_from_slice(&[0x88, 0xB5]);
            wire.send(&frame).unwrap();
            assert_eq!(take(&queues, 1)[0].0, queue_of[&flow], "back");
        }
        assert_eq!(used(&queue_of), [0, 1, 2, 3]);
        for (ip_type, rest) in [([8, 0], &[0x45][..]), ([0x86, 0xDD], &[0x60, 0]), ([0x81, 0], &[0, 7])] {
            let mut short = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
            short.extend(ip_type);
            short.extend(rest);
            short.extend(MARK);
            wire.send(&short).unwrap();
            take(&queues, 1);
        }
    });
}

#[test]
fn sockets_of_the_host() {
    for steering in [Steering::Rss, Steering::Hash] {
        in_new_namespace(move || {
            let tap = steered(steering);
            let queues = attached(&tap);
            ip("addr add 10.9.0.1/24 dev vs0");
            ip("neigh add 10.9.0.2 lladdr 02:00:00:00:00:07 dev vs0 nud permanent");
            let mut queue_of = BTreeMap::new();
            for flow in 0..FLOWS {
                let socket = UdpSocket::bind("10.9.0.1:0").unwrap();
                socket.connect("10.9.0.2:9").unwrap();
                for _ in 0..3 {
                    socket.send(MARK).unwrap();
                    let queue_found = take(&queues, 1)[0].0;
                    assert_eq!(
                        *queue_of.entry(flow).or_insert(queue_found),
                        queue_found,
                        "{steering}: flow {flow} stays"
                    );
                }
            }
            assert_eq!(used(&queue_of), [0, 1, 2, 3], "{steering}");
        });
    }
}

#[test]
fn the_sending_cpu_has_its_queue() {
    in_new_namespace(|| {
        let tap = steered(Steering::Cpu);
        let queues = attached(&tap);
        let all = sched_getaffinity(None).unwrap();
        for cpu in (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)) {
            let mut one = CpuSet::new();
            one.set(cpu);
            sched_setaffinity(None, &one).unwrap();
            assert_eq!(used(&queues_of_frames(&queues)), [cpu % usize::from(QUEUES)], "CPU {cpu}");
        }
        // The kernel's own steering again: by its hash, over all queues.
        tap.set_steering(Steering::Auto).unwrap();
        assert_eq!(used(&queues_of_frames(&queues)), [0, 1, 2, 3]);
    });
}

#[test]
fn an_interface_that_stays_is_left_to_the_kernel() {
    in_new_namespace(|| {
        let options = Options { steering: Steering::Cpu, persist: true, ..Options::default() };
        drop(Tap::open_with("vs0", QUEUES, &options).unwrap());
        let queues = attached(&open_again("vs0", QUEUES));
        assert_eq!(used(&queues_of_frames(&queues)), [0, 1, 2, 3]);
    });
}

#[test]
fn without_a_privilege_there_is_no_program() {
    in_new_namespace(|| {
        let tap = Tap::open("vs0", QUEUES).unwrap();
        drop_privileges();
        let anybody = std::fs::read_to_string("/proc/sys/kernel/unprivileged_bpf_disabled");
        if anybody.is_ok_and(|value| value.trim() == "0") {
            println!("skipped: no permission for eBPF, since everybody has it here");
            return;
        }
        let e = tap.set_steering(Steering::Rss).unwrap_err().to_string();
        assert!(e.contains("no permission") && e.contains("CAP_BPF") && e.contains("steering=rss"), "{e}");
        assert_eq!(tap.steering(), Steering::Auto);
    });
}
