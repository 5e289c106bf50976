//! The fuzz targets with stable Rust: inputs from a seeded generator, without coverage.
//!
//! `seeded TARGET SECONDS [SEED]`; `seeded TARGET --input FILE` runs one input, and `--seed N` runs
//! the input with the number that a failure reported.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use vshunt_fuzz::TARGETS;

fn input(seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let len = random.usize(..700);
    (0..len).map(|_| random.u8(..)).collect()
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let target = args.first().and_then(|name| TARGETS.iter().find(|t| t.0 == name));
    let (Some(&(name, run)), Some(how)) = (target, args.get(1)) else {
        eprintln!(
            "usage: seeded rings|blk_request|messages|qcow2_image|nbd_replies|nbd_requests SECONDS [SEED] | --seed SEED | --input FILE"
        );
        return ExitCode::from(2);
    };
    if how == "--input" {
        run(&std::fs::read(&args[2]).expect("an input"));
        return ExitCode::SUCCESS;
    }
    if how == "--seed" {
        run(&input(args[2].parse().expect("a number")));
        return ExitCode::SUCCESS;
    }
    let seconds = how.parse().expect("seconds, a number");
    let mut seed: u64 = args.get(2).map_or(1, |s| s.parse().expect("a number"));
    let first = seed;
    let end = Instant::now() + Duration::from_secs(seconds);
    static SEED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        default(info);
        let seed = SEED.load(std::sync::atomic::Ordering::Relaxed);
        eprintln!("input of seed {seed}; this one again: seeded TARGET --seed {seed}");
    }));
    while Instant::now() < end {
        SEED.store(seed, std::sync::atomic::Ordering::Relaxed);
        run(&input(seed));
        seed += 1;
    }
    println!("{name}: {} inputs from seed {first}", seed - first);
    ExitCode::SUCCESS
}
