use super::*;

const STAMP: Stamp = Stamp { sector: 40, generation: 7, seed: 3 };

fn written(stamp: Stamp, sectors: usize) -> Vec<u64> {
    let mut words = vec![0u64; sectors * WORDS];
    // SAFETY: the vector has 512 bytes for each sector and is aligned for u64.
    unsafe { write_sectors(words.as_mut_ptr().cast(), stamp, sectors) };
    words
}

fn check(words: &[u64], stamp: Stamp, lowest: u32) -> Result<(), Box<Mismatch>> {
    // SAFETY: the slice has this number of sectors.
    unsafe { check_sectors(words.as_ptr().cast(), stamp, lowest, words.len() / WORDS) }
}

#[test]
fn what_was_written_is_accepted_and_nothing_else() {
    let good = written(STAMP, 8);
    assert!(check(&good, STAMP, 7).is_ok());
    assert!(check(&good, STAMP, 6).is_ok());
    for word in [0, 1, 2, 3, 62, 63, 64, 500] {
        let mut bad = good.clone();
        bad[word] ^= 1 << (word % 64);
        assert!(check(&bad, STAMP, 7).is_err(), "word {word}");
    }
}

#[test]
fn an_old_write_is_named() {
    let old = written(Stamp { generation: 5, ..STAMP }, 1);
    let message = check(&old, STAMP, 7).unwrap_err().to_string();
    assert_eq!(message, "sector 40: expected generation 7 of seed 3, found sector 40, generation 5, seed 3");
    assert!(check(&old, STAMP, 5).is_ok());
    let message = check(&old, STAMP, 6).unwrap_err().to_string();
    assert!(message.contains("expected generation 6 to 7"), "{message}");
}

#[test]
fn the_second_sector_of_a_block_is_told_from_the_first() {
    let shifted = written(Stamp { sector: 41, ..STAMP }, 1);
    let message = check(&shifted, STAMP, 7).unwrap_err().to_string();
    assert!(message.ends_with("found sector 41, generation 7, seed 3"), "{message}");
}

#[test]
fn zeroes_and_foreign_data_are_named() {
    assert!(check(&[0; WORDS], STAMP, 7).unwrap_err().to_string().ends_with("found zeroes"));
    assert!(check(&[9; WORDS], STAMP, 7).unwrap_err().to_string().contains("no run of vshunt-bench wrote"));
}

#[test]
fn words_of_two_generations_do_only_while_a_write_runs() {
    let mut torn = written(STAMP, 1);
    let older = written(Stamp { generation: 6, ..STAMP }, 1);
    torn[10..40].copy_from_slice(&older[10..40]);
    assert!(check(&torn, STAMP, 6).is_ok());
    let message = check(&torn, STAMP, 7).unwrap_err().to_string();
    assert!(message.contains("torn or damaged from byte 80"), "{message}");
    torn[20] = 1;
    assert!(check(&torn, STAMP, 6).is_err());
}
