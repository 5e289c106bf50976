//! Both sides on threads of their own that sleep whenever they can. A lost wake-up shows as a
//! time-out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::*;

/// Sleeps until woken. A wake-up that came before counts.
fn sleep(woken: &AtomicBool) {
    while !woken.swap(false, Ordering::Acquire) {
        let start = std::time::Instant::now();
        thread::park_timeout(Duration::from_secs(60));
        assert!(start.elapsed() < Duration::from_secs(60), "lost wake-up");
    }
}

#[test]
fn no_wake_up_is_lost_between_threads() {
    // Miri rejects atomic accesses of different sizes to one location, which packed rings need.
    for features in all_features().filter(|f| !cfg!(miri) || !f.packed) {
        let total = iterations(2000) as u16;
        let Sides { arena, mut driver, mut device, .. } = Sides::new(4, features);
        let (kicked, notified) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let driver_thread = thread::current();
        let mem = arena.mem.clone();
        let device_thread = {
            let (kicked, notified) = (kicked.clone(), notified.clone());
            thread::spawn(move || {
                let mut chain = Chain::new();
                let mut served = 0;
                while served < total {
                    while device.pop(&mem, &mut chain).unwrap() {
                        device.push(chain.head, u32::from(chain.head.id) + 1);
                        served += 1;
                        if served % 3 == 0 && device.publish() {
                            notified.store(true, Ordering::Release);
                            driver_thread.unpark();
                        }
                    }
                    if device.publish() {
                        notified.store(true, Ordering::Release);
                        driver_thread.unpark();
                    }
                    if served < total && !device.enable_kick() {
                        sleep(&kicked);
                        device.disable_kick();
                    }
                }
            })
        };
        let seg = DriverSeg { addr: BUFFERS, len: 64, writable: true };
        let (mut sent, mut done) = (0, 0);
        while done < total {
            while sent < total && driver.add(&[seg], None, sent).is_ok() {
                sent += 1;
            }
            if driver.publish() {
                kicked.store(true, Ordering::Release);
                device_thread.thread().unpark();
            }
            let before = done;
            while let Some(used) = driver.poll() {
                assert_eq!(used.cookie, done);
                done += 1;
            }
            if done == before && !driver.enable_notify() {
                sleep(&notified);
                driver.disable_notify();
            }
        }
        device_thread.join().unwrap();
    }
}

/// Tests a driver that rewrites its descriptors while the device reads them.
#[test]
fn descriptors_that_change_under_the_walk_do_no_harm() {
    if cfg!(miri) {
        return;
    }
    for features in all_features().filter(|f| f.indirect) {
        let arena = arena();
        let size = 8;
        let (addrs, guest) = arena.ring(RING, size, features);
        let stop = Arc::new(AtomicBool::new(false));
        let targets: Vec<usize> = (0..u64::from(size))
            .flat_map(|i| [guest[0] + 16 * i, guest[0] + 16 * i + 8])
            .chain((0..32).map(|i| TABLES + 8 * i))
            .map(|guest| arena.host(guest).expose_provenance())
            .collect();
        let scribbler = {
            let stop = stop.clone();
            thread::spawn(move || {
                let mut rng = Rng::new(5);
                while !stop.load(Ordering::Relaxed) {
                    let at = targets[rng.below(targets.len() as u64) as usize];
                    let value = match rng.below(3) {
                        0 => BUFFERS + rng.below(0x3_0000),
                        1 => TABLES,
                        _ => 32 | rng.below(8) << 32 | rng.below(9) << 48 | (rng.next() & 0x8080 << 48),
                    };
                    // SAFETY: inside the arena, which is dropped after this thread has ended.
                    unsafe { std::ptr::with_exposed_provenance_mut::<u64>(at).write_volatile(value) };
                }
            })
        };
        let mut chain = Chain::new();
        let mut base = if features.packed { 0x8000_8000 } else { 0 };
        for _ in 0..200 {
            // SAFETY: the arena outlives the ring.
            let mut ring = unsafe { DeviceRing::new(size, features, addrs, base) }.unwrap();
            for round in 0..100u16 {
                if !features.packed {
                    arena.put_u16(guest[1] + 2, (ring.base() as u16).wrapping_add(1));
                    arena.put_u16(guest[1] + 4 + 2 * (ring.base() as u16 % size) as u64, round % size);
                }
                match ring.pop(&arena.mem, &mut chain) {
                    Ok(true) => {
                        assert!(chain.segs.iter().all(|s| arena.inside(s.ptr, s.len as usize)));
                        ring.push(chain.head, 1);
                        let _ = ring.publish();
                    }
                    Ok(false) => {}
                    Err(_) => break,
                }
            }
            base = ring.base();
        }
        stop.store(true, Ordering::Relaxed);
        scribbler.join().unwrap();
        arena.check_guards();
    }
}
