//! Where the time of a request goes: the back end's stamps (`spile xen-disk --trace`) joined with the guest's.

use std::path::Path;

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result};
use utoipa::ToSchema;

use super::guest::Times;
use super::sample::mean;

/// Of a trace file, as front-blkif writes it.
const MAGIC: u32 = 0x5370_7472;
const VERSION: u32 = 2;
const HEADER_BYTES: usize = 64;
const RECORD_BYTES: usize = 64;

/// The phases of a request, in order.
pub const PHASES: [&str; 9] = [
    "kick",
    "pick-up",
    "copy in or map",
    "submit",
    "complete",
    "copy out or unmap",
    "response",
    "notify",
    "guest's end",
];

/// The times of a ring's request, in ns of CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Taken from the ring.
    pub taken: u64,
    /// It had its memory: copied or mapped.
    pub loaded: u64,
    /// The disk began.
    pub begun: u64,
    /// The disk was done.
    pub ended: u64,
    /// Copied back or unmapped.
    pub stored: u64,
    /// The guest could see the answer.
    pub shown: u64,
}

/// The records of a trace, in the order in which requests were taken.
///
/// # Errors
/// When the file cannot be read, or is no trace.
pub fn read(path: &Path) -> Result<Vec<Record>> {
    let bytes = std::fs::read(path).map_err(|e| Error::io("read a trace", e).at_path(path))?;
    parse(&bytes).ok_or_else(|| Error::new(ErrorKind::Corrupt, "is no trace of requests").at_path(path))
}

fn parse(bytes: &[u8]) -> Option<Vec<Record>> {
    let u32_at = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
    let (records, written) = (u64::from(u32_at(8)?), u64_at(16)?);
    if (u32_at(0)?, u32_at(4)?) != (MAGIC, VERSION) {
        return None;
    }
    let record = |number: u64| {
        let field = |field: usize| u64_at(HEADER_BYTES + number as usize * RECORD_BYTES + 8 * field);
        Some(Record {
            taken: field(1)?,
            loaded: field(2)?,
            begun: field(3)?,
            ended: field(4)?,
            stored: field(5)?,
            shown: field(6)?,
        })
    };
    let mut all = (0..written.min(records)).map(record).collect::<Option<Vec<_>>>()?;
    all.sort_by_key(|record| record.taken);
    Some(all)
}

/// The mean time of each phase. Of a request that went in several parts, the phases of that part which was answered
/// last: what its pick-up waited for is the others' work. Their sum is the mean latency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Phases {
    /// The guest grants its pages (with persistent grants and a write: copies), fills the ring and rings.
    pub kick_us: f64,
    /// Until the back end takes the request from the ring.
    pub pickup_us: f64,
    /// The data of a write are copied in, or pages are mapped.
    pub copy_in_or_map_us: f64,
    /// Until the disk begins.
    pub submit_us: f64,
    /// The disk's time.
    pub complete_us: f64,
    /// The data of a read are copied out, or pages are unmapped.
    pub copy_out_or_unmap_us: f64,
    /// Until the guest can see the answer; what is still mapped then is unmapped.
    pub response_us: f64,
    /// Until the guest is awake.
    pub notify_us: f64,
    /// The guest ends its grants (with persistent grants and a read: copies).
    pub guest_end_us: f64,
}

impl Phases {
    /// In the order of [`PHASES`].
    pub fn values_us(&self) -> [f64; 9] {
        self.clone().fields_us().map(|field| *field)
    }

    fn from_values_us(values: [f64; 9]) -> Self {
        let mut phases = Self::default();
        phases.fields_us().into_iter().zip(values).for_each(|(field, value)| *field = value);
        phases
    }

    fn fields_us(&mut self) -> [&mut f64; 9] {
        [
            &mut self.kick_us,
            &mut self.pickup_us,
            &mut self.copy_in_or_map_us,
            &mut self.submit_us,
            &mut self.complete_us,
            &mut self.copy_out_or_unmap_us,
            &mut self.response_us,
            &mut self.notify_us,
            &mut self.guest_end_us,
        ]
    }

    /// The means over `requests`, by `records` in the order in which they were taken; `None` when a request has none.
    pub fn of(requests: &[Times], records: &[Record]) -> Option<Self> {
        let each = requests.iter().map(|times| phases(times, last_part(times, records)?));
        let each: Vec<[u64; 9]> = each.collect::<Option<_>>()?;
        let us = |phase: usize| mean(each.iter().map(|phases| phases[phase] as f64 / 1e3));
        (!each.is_empty()).then(|| Self::from_values_us(std::array::from_fn(us)))
    }

    /// The mean of several rows; `None` of none.
    pub fn mean(rows: &[Self]) -> Option<Self> {
        let us = |phase: usize| mean(rows.iter().map(|row| row.values_us()[phase]));
        (!rows.is_empty()).then(|| Self::from_values_us(std::array::from_fn(us)))
    }
}

/// The part of a request that was answered last, of `records` in the order in which they were taken. There is one request
/// at a time, so that what was taken in its time is its own.
fn last_part<'a>(times: &Times, records: &'a [Record]) -> Option<&'a Record> {
    let from = records.partition_point(|record| record.taken < times.started);
    let until = records.partition_point(|record| record.taken <= times.woken);
    records[from..until.max(from)].iter().max_by_key(|record| record.shown)
}

/// ns of each phase. The two sides stamp a little after what they stamp, so that one may see the other's doing before it was
/// stamped: no phase is negative, and the sum stays.
fn phases(times: &Times, part: &Record) -> Option<[u64; 9]> {
    let Times { started, kicked, woken, done } = *times;
    let Record { taken, loaded, begun, ended, stored, shown } = *part;
    let edges = [
        started,
        kicked.min(taken),
        taken,
        loaded,
        begun,
        ended,
        stored,
        shown.min(woken.max(stored)),
        woken.max(stored),
        done,
    ];
    edges.is_sorted().then(|| std::array::from_fn(|phase| edges[phase + 1] - edges[phase]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(records: u32, stamps: &[[u64; 6]]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES + records as usize * RECORD_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
        bytes[8..12].copy_from_slice(&records.to_le_bytes());
        bytes[16..24].copy_from_slice(&(stamps.len() as u64).to_le_bytes());
        for (number, stamps) in stamps.iter().enumerate() {
            let at = HEADER_BYTES + number % records as usize * RECORD_BYTES + 8;
            for (field, stamp) in stamps.iter().enumerate() {
                bytes[at + 8 * field..][..8].copy_from_slice(&stamp.to_le_bytes());
            }
        }
        bytes
    }

    const PART: [u64; 6] = [1300, 1400, 1500, 1600, 1700, 1800];

    #[test]
    fn the_newest_records_are_read() {
        let later = PART.map(|stamp| stamp + 5000);
        let records = parse(&file(2, &[PART.map(|stamp| stamp + 9000), later, PART])).unwrap();
        assert_eq!(records.iter().map(|record| record.shown).collect::<Vec<_>>(), [1800, 6800]);
        assert_eq!(parse(&file(2, &[PART])).unwrap().len(), 1);
        assert!(parse(&[0; 64]).is_none() && parse(b"x").is_none());
        assert!(parse(&file(2, &[PART, PART])[..100]).is_none());
    }

    #[test]
    fn phases_add_up_to_the_latency() {
        let times = Times { started: 1000, kicked: 1200, woken: 1900, done: 2000 };
        let first_part = PART.map(|stamp| stamp - 50);
        let records = parse(&file(4, &[first_part, PART])).unwrap();
        let phases = Phases::of(&[times], &records).unwrap();
        assert_eq!(phases.values_us(), [0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]);
        assert!((phases.values_us().iter().sum::<f64>() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_back_end_that_was_looking_may_be_ahead_of_the_kick() {
        let times = Times { started: 1000, kicked: 1350, woken: 1900, done: 2000 };
        let phases = Phases::of(&[times], &parse(&file(1, &[PART])).unwrap()).unwrap();
        assert_eq!((phases.kick_us, phases.pickup_us), (0.3, 0.0));
    }

    #[test]
    fn a_guest_that_was_looking_may_be_ahead_of_the_stamp() {
        let times = Times { started: 1000, kicked: 1200, woken: 1750, done: 2000 };
        let phases = Phases::of(&[times], &parse(&file(1, &[PART])).unwrap()).unwrap();
        assert_eq!((phases.response_us, phases.notify_us, phases.guest_end_us), (0.05, 0.0, 0.25));
    }

    #[test]
    fn a_request_without_records_has_no_phases() {
        let times = Times { started: 1400, kicked: 1450, woken: 1900, done: 2000 };
        assert_eq!(Phases::of(&[times], &parse(&file(1, &[PART])).unwrap()), None, "taken before it began");
        assert_eq!(Phases::of(&[times], &[]), None);
    }
}
