//! Random changes of a disk over a qcow2 image, with what it must read as, through kills and closes.

use std::ops::Range;

use spile_core::{Disk, Extent, WriteZeroes};
use spile_image::check::{Report, Severity};
use spile_image::{Format, Graph};

use crate::support::{MemStore, World, block_on, pattern, read, write};

/// A disk that is changed, and what it must show.
pub struct Walk<'a> {
    world: &'a World,
    path: &'a str,
    disk: Graph<MemStore>,
    expected: Vec<u8>,
    random: u64,
    /// A process was killed: clusters may have leaked.
    was_killed: bool,
}

impl<'a> Walk<'a> {
    pub fn new(world: &'a World, path: &'a str, seed: u64) -> Self {
        let disk = world.open(path);
        let expected = read(&disk, 0..disk.size_bytes());
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Self { world, path, disk, expected, random, was_killed: false }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) % end
    }

    /// A run of sectors, most often short, often at the border of a cluster.
    fn range(&mut self) -> Range<u64> {
        let size = self.expected.len() as u64;
        let longest = [4096, 65536, 300 << 10][self.below(3) as usize];
        let mut start = self.below(size / 512) * 512;
        if self.below(2) == 0 {
            start = start / 65536 * 65536;
        }
        let len = (self.below(longest / 512) + 1) * 512;
        start..(start + len).min(size)
    }

    pub fn step(&mut self) {
        let range = self.range();
        let place = range.start as usize..range.end as usize;
        let extent = Extent::from_range(range.clone());
        match self.below(20) {
            0..8 => {
                let bytes = pattern(self.random, place.len());
                write(&self.disk, range.start, &bytes);
                self.expected[place].copy_from_slice(&bytes);
            }
            8..12 => {
                let how = WriteZeroes { may_unmap: self.below(2) == 0, only_if_fast: false };
                block_on(self.disk.write_zeroes(extent, how)).unwrap();
                self.expected[place].fill(0);
            }
            12..14 => {
                block_on(self.disk.discard(extent)).unwrap();
                let now = read(&self.disk, range);
                // A discard leaves bytes as they are, or zeroes them, sector by sector.
                for (old, new) in self.expected[place].chunks_mut(512).zip(now.chunks(512)) {
                    assert!(old == new || new.iter().all(|byte| *byte == 0), "a discard shows other bytes");
                    old.copy_from_slice(new);
                }
            }
            14 | 15 => block_on(self.disk.flush()).unwrap(),
            16 => self.kill(),
            17 => self.close(),
            _ => assert!(read(&self.disk, range) == self.expected[place], "wrong bytes at {extent}"),
        }
    }

    /// Ends the process, and opens the image anew.
    pub fn kill(&mut self) {
        self.was_killed = true;
        self.disk = self.world.open(self.path);
        self.verify();
    }

    /// Closes the disk, and opens it anew.
    pub fn close(&mut self) {
        block_on(self.disk.close()).unwrap();
        self.check(!self.was_killed);
        self.disk = self.world.open(self.path);
        self.verify();
    }

    pub fn verify(&self) {
        let found = read(&self.disk, 0..self.expected.len() as u64);
        let wrong = found.iter().zip(&self.expected).position(|(one, other)| one != other);
        assert_eq!(wrong, None, "the first wrong byte");
        self.check(false);
    }

    fn check(&self, finds_leaks: bool) {
        let report = self.report();
        let bad = if finds_leaks { Severity::Leak } else { Severity::Corruption };
        let findings: Vec<_> = report.findings.iter().filter(|found| found.severity >= bad).collect();
        assert!(findings.is_empty(), "{findings:#?}");
    }

    fn report(&self) -> Report {
        let store = self.world.files.store(self.path);
        block_on(Format::Qcow2.check(&store, &*self.world.env)).unwrap()
    }

    /// Closes the disk for good. Returns what it holds.
    pub fn end(mut self) -> Vec<u8> {
        self.close();
        block_on(self.disk.close()).unwrap();
        self.expected
    }
}
