//! A fuzz target's short run: a codec over its corpus in `fuzz/corpus`, and over seeded mutations of it. The tests of
//! each crate that has codecs include this file.
//!
//! The long run is `make fuzz`. A failure here prints the bytes that caused it; they belong into the corpus once the
//! codec is mended.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

const MUTATIONS: usize = 20_000;
/// Where mutations stop growing.
const MAX_LEN: usize = 4096;
/// Values at which lengths, offsets and counts tend to break.
const EDGES: [u32; 10] = [0, 1, 0x7f, 0x80, 511, 512, 0x7fff_ffff, 0x8000_0000, 0xffff_fffe, 0xffff_ffff];

/// A xorshift generator: the same mutations on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let entries = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut seeds: Vec<(String, Vec<u8>)> = entries
        .map(|entry| entry.expect("the corpus can be listed").path())
        .map(|path| (path.display().to_string(), std::fs::read(&path).expect("a seed is a file")))
        .collect();
    seeds.sort();
    assert!(seeds.len() >= 5, "{} has only {} seeds", dir.display(), seeds.len());
    seeds
}

/// One to eight small damages.
fn mutate(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..=random.below(8) {
        let at = random.below(bytes.len());
        match random.below(6) {
            _ if bytes.is_empty() => bytes.push(random.next() as u8),
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => {
                let edge = EDGES[random.below(EDGES.len())].to_be_bytes();
                let at = at & !3;
                let end = bytes.len().min(at + 4);
                bytes[at..end].copy_from_slice(&edge[..end - at]);
            }
            3 => bytes.truncate(at),
            4 if bytes.len() < MAX_LEN => bytes.insert(at, random.next() as u8),
            _ => {
                let end = bytes.len().min(other.len());
                let at = random.below(end);
                bytes[at..end].copy_from_slice(&other[at..end]);
            }
        }
    }
}

/// Runs `codec` over the corpus of `target`; panics with the input on which it fails.
pub fn run(target: &str, codec: fn(&[u8])) {
    run_times(target, MUTATIONS, codec);
}

/// [`run`], with so many mutations: for targets that do more than read bytes.
pub fn run_times(target: &str, mutations: usize, codec: fn(&[u8])) {
    let seeds = corpus(target);
    let attempt = |what: &str, bytes: &[u8]| {
        let outcome = catch_unwind(AssertUnwindSafe(|| codec(bytes)));
        assert!(outcome.is_ok(), "{target} fails on {what}: {}", bytes.escape_ascii());
    };
    for (name, bytes) in &seeds {
        attempt(name, bytes);
    }
    let mut random = Random(0x5eed_0000 + target.len() as u64);
    for number in 0..mutations {
        let mut bytes = seeds[random.below(seeds.len())].1.clone();
        let other = &seeds[random.below(seeds.len())].1;
        mutate(&mut random, &mut bytes, other);
        attempt(&format!("mutation {number}"), &bytes);
    }
}
