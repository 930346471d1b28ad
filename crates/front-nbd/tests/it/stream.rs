//! Random valid request streams, pipelined, against an oracle in memory.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use spile_front_nbd::wire::request::{Command, FLAG_DF, FLAG_FUA, FLAG_NO_HOLE};

use crate::client::{Client, ready};
use crate::engines::{on_each_engine, run_on_aio};
use crate::{Rig, SIZE, rig_with};

#[derive(Clone, Debug)]
enum Step {
    Read { offset: u64, len: u32, df: bool },
    Write { offset: u64, len: u32, byte: u8, fua: bool },
    Zero { offset: u64, len: u32, no_hole: bool },
    Trim { offset: u64, len: u32 },
    Flush,
}

impl Step {
    fn range(&self) -> Option<(u64, u64)> {
        match *self {
            Self::Read { offset, len, .. }
            | Self::Write { offset, len, .. }
            | Self::Zero { offset, len, .. }
            | Self::Trim { offset, len } => Some((offset, offset + u64::from(len))),
            Self::Flush => None,
        }
    }

    /// Requests that overlap may take effect in any order, so the oracle sends one only after the other.
    fn conflicts(&self, other: &Step) -> bool {
        match (self.range(), other.range()) {
            (Some(a), Some(b)) => a.0 < b.1 && b.0 < a.1,
            _ => false,
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let range = (0..SIZE, prop_oneof![8 => 0u32..9000, 1 => 60_000u32..300_000])
        .prop_map(|(offset, len)| (offset, len.min((SIZE - offset) as u32)));
    let step = (range, 0u8..10, any::<u8>(), any::<bool>()).prop_map(|((offset, len), kind, byte, flag)| match kind {
        0..4 => Step::Read { offset, len, df: flag },
        4..7 => Step::Write { offset, len, byte, fua: flag && byte < 30 },
        7 => Step::Zero { offset, len, no_hole: flag },
        8 => Step::Trim { offset, len },
        _ => Step::Flush,
    });
    prop::collection::vec(step, 1..60)
}

fn payload(byte: u8, len: u32) -> Vec<u8> {
    (0..len).map(|at| byte.wrapping_add((at >> 3) as u8)).collect()
}

/// The client, what the disk must hold, and the requests in flight with what their reads must bring.
struct Checker {
    client: Client<UnixStream>,
    structured: bool,
    oracle: Vec<u8>,
    in_flight: HashMap<u64, (Step, Vec<u8>)>,
}

impl Checker {
    fn send(&mut self, step: &Step) {
        while !self.in_flight.is_empty() && self.must_wait(step) {
            self.take_answer();
        }
        let range = step.range().map(|(a, b)| a as usize..b as usize).unwrap_or_default();
        let (client, slice) = (&mut self.client, &mut self.oracle[range]);
        let mut expected = Vec::new();
        let cookie = match *step {
            Step::Read { offset, len, df } => {
                expected = slice.to_vec();
                let flags = if df && self.structured { FLAG_DF } else { 0 };
                client.request(Command::Read, flags, offset, len)
            }
            Step::Write { offset, len, byte, fua } => {
                slice.copy_from_slice(&payload(byte, len));
                client.write(if fua { FLAG_FUA } else { 0 }, offset, &payload(byte, len))
            }
            Step::Zero { offset, len, no_hole } => {
                slice.fill(0);
                let flags = if no_hole { FLAG_NO_HOLE } else { 0 };
                client.request(Command::WriteZeroes, flags, offset, len)
            }
            Step::Trim { offset, len } => {
                slice.fill(0); // this disk's trim zeroes
                client.request(Command::Trim, 0, offset, len)
            }
            Step::Flush => client.request(Command::Flush, 0, 0, 0),
        };
        self.in_flight.insert(cookie, (step.clone(), expected));
    }

    /// This client does not read while it writes, so it must never be owed more than a socket holds: the server
    /// would rightly stop reading from it.
    fn must_wait(&self, step: &Step) -> bool {
        let owed: usize = self.in_flight.values().map(|(_, expected)| expected.len()).sum();
        let conflict = self.in_flight.values().any(|(other, _)| other.conflicts(step));
        conflict || owed > 50_000 || self.in_flight.len() >= 32
    }

    fn take_answer(&mut self) {
        let in_flight = &self.in_flight;
        let answer = self.client.answer(|cookie| match in_flight.get(&cookie) {
            Some((Step::Read { offset, len, .. }, _)) => Some((*offset, *len)),
            _ => None,
        });
        let (step, expected) = self.in_flight.remove(&answer.cookie).expect("an answer to a request, once");
        match step {
            Step::Read { offset, len, .. } => {
                assert!(answer.data(offset, len as usize) == expected, "{step:?}");
            }
            _ => assert_eq!(answer.errno, 0, "{step:?}"),
        }
    }
}

fn run_stream(rig: &Rig, structured: bool, steps: &[Step]) {
    let mut client = ready(&rig.path(), structured);
    assert_eq!(client.call(Command::WriteZeroes, 0, 0, SIZE as u32).errno, 0);
    let oracle = vec![0; SIZE as usize];
    let mut checker = Checker { client, structured, oracle, in_flight: HashMap::new() };
    steps.iter().for_each(|step| checker.send(step));
    while !checker.in_flight.is_empty() {
        checker.take_answer();
    }
}

on_each_engine! {
    fn random_streams_agree_with_the_oracle(kind) {
        let rig = rig_with(kind, |_, config| config.max_in_flight = 16);
        let config = Config { cases: 40, ..Config::default() };
        let result = TestRunner::new(config).run(&(any::<bool>(), steps()), |(structured, steps)| {
            run_stream(&rig, structured, &steps);
            Ok::<(), TestCaseError>(())
        });
        result.unwrap();
        rig.assert_clean();
    }
}
