//! What a fuzzer's bytes are to the targets that do one thing after the other.
#![allow(dead_code, reason = "each target takes its part")]

/// Takes numbers off a script; behind its end there are zeroes.
pub struct Script<'a>(pub &'a [u8]);

impl<'a> Script<'a> {
    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    pub fn u8(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    pub fn u32(&mut self) -> u32 {
        self.take(4).iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte))
    }

    pub fn u64(&mut self) -> u64 {
        self.take(8).iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}
