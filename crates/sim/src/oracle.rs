//! The judge: it knows for every sector which values a read may return.
//!
//! Each write, zeroing and discard is a *version* of the sectors it covers, with the times of its issue and its answer.
//! One version comes *before* another when it was over before the other was issued. A read must not return a version that
//! came before one that had certainly taken effect when the read began. That is one rule for everything; a crash only
//! changes what is certain:
//! - after the death of the process, what was answered stays certain, and what was in flight is over: it happened or not;
//! - after a power cut, only what a completed flush covered (or was written with FUA) stays certain.
//!
//! What a read returns while nothing is in flight on the sector *settles* it: a new version, with the value read,
//! so that a disk that goes back and forth in time is found. After a power cut what was read came from the medium:
//! it is certain from then on.
//!
//! A discard may leave old bytes ("what was freed reads as zeroes, the rest is unchanged"): it is never
//! certain until it is seen. One that overlapped a change in flight may have been seen only because of that change: it is as durable as
//! that one. A request that was answered with an error leaves its sectors open until they are written again.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::stamp::{self, SECTOR, Value};

const NEVER: u64 = u64::MAX;

/// The effect of a request on its sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// They hold new data.
    Data,
    /// They are zeroes for certain.
    Zeroes,
    /// They are zeroes, or unchanged.
    Discard,
}

/// The kinds of interruption of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// The process died. The page cache stays.
    Death,
    /// The host lost power.
    PowerCut,
}

#[derive(Clone, Debug)]
struct Version {
    value: Value,
    issued: u64,
    /// When it was over (answered, failed or crashed): it took effect before this time, or never will.
    ended: u64,
    /// When it was answered with success.
    acked: u64,
    /// When a read that returned it was over.
    seen: u64,
    /// It is durable once it is answered.
    fua: bool,
    discard: bool,
    /// It was answered with an error: nobody may rely on either content until the sector is written again.
    failed: bool,
    /// It may be done again until it is answered, also when a read has returned it by then.
    again: bool,
}

impl Version {
    /// It has taken effect before this time, if it has at all.
    fn over(&self) -> u64 {
        if self.again { self.ended } else { self.ended.min(self.seen) }
    }

    /// It certainly had taken effect at this time.
    fn certain(&self) -> u64 {
        if self.discard { self.seen } else { self.acked.min(self.seen) }
    }

    fn durable(&self, flushed: u64) -> bool {
        let answered = if self.discard && self.seen == NEVER { NEVER } else { self.acked };
        answered < flushed || (self.fua && answered != NEVER)
    }

    /// It was in flight at the same time as `other`.
    fn overlaps(&self, other: &Self) -> bool {
        self.issued != other.issued && self.issued < other.over() && self.over() > other.issued
    }
}

/// The version is durable, by itself and by what it leans on: a discard frees what was there, and what was in flight may have been there.
fn is_durable(version: &Version, versions: &[Version], flushed: u64) -> bool {
    let leans = |other: &Version| version.overlaps(other) && !other.durable(flushed);
    version.durable(flushed) && (!version.discard || version.fua || !versions.iter().any(leans))
}

/// A change under way.
#[derive(Clone, Debug)]
pub struct Pending {
    /// The number of the write, for its stamps.
    pub write: u64,
    sectors: Range<u64>,
    issued: u64,
}

/// What every sector may hold; at first all of them zeroes.
#[derive(Clone, Default)]
pub struct Oracle {
    /// The sectors that were written. All others read as zeroes.
    sectors: BTreeMap<u64, Vec<Version>>,
    now: u64,
    writes: u64,
    /// A completed flush was issued at this time, the latest of all.
    flushed: u64,
    /// The time of the last power cut.
    cut: u64,
    in_flight: BTreeMap<u64, Pending>,
    /// The times at which reads under way began, with how many.
    reads: BTreeMap<u64, u64>,
    /// Requests that begin now may be done again until they are answered.
    again: bool,
}

impl Oracle {
    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// From now on requests that meet trouble are tried again, or are not: each may take effect several times until it is answered.
    pub fn tries_again(&mut self, again: bool) {
        self.again = again;
    }

    /// A change of `sectors` is issued.
    pub fn begin(&mut self, sectors: Range<u64>, change: Change, fua: bool) -> Pending {
        let issued = self.tick();
        self.writes += 1;
        let value = if change == Change::Data { Value::Stamp(self.writes) } else { Value::Zero };
        let (ended, acked, seen, discard) = (NEVER, NEVER, NEVER, change == Change::Discard);
        let version = Version { value, issued, ended, acked, seen, fua, discard, failed: false, again: self.again };
        for sector in sectors.clone() {
            self.prune(sector);
            self.history(sector).push(version.clone());
        }
        let pending = Pending { write: self.writes, sectors, issued };
        self.in_flight.insert(issued, pending.clone());
        pending
    }

    fn history(&mut self, sector: u64) -> &mut Vec<Version> {
        self.sectors.entry(sector).or_insert_with(|| {
            let (value, fua, discard) = (Value::Zero, true, false);
            let (issued, ended, acked, seen) = (0, 0, 0, 0);
            vec![Version { value, issued, ended, acked, seen, fua, discard, failed: false, again: false }]
        })
    }

    /// Drops versions that no read may return any more, whatever happens.
    fn prune(&mut self, sector: u64) {
        let since = self.reads.first_key_value().map_or(self.now, |(start, _)| *start);
        let flushed = self.flushed;
        let Some(versions) = self.sectors.get_mut(&sector) else { return };
        if versions.len() < 6 {
            return;
        }
        let keep: Vec<bool> = versions
            .iter()
            .map(|v| {
                let after = |w: &&Version| v.over() < w.issued;
                let gone = versions.iter().filter(after).any(|w| w.certain() < since);
                !gone || !versions.iter().filter(after).any(|w| is_durable(w, versions, flushed))
            })
            .collect();
        let mut keep = keep.into_iter();
        versions.retain(|_| keep.next().unwrap_or(true));
    }

    /// The change was answered with success (`true`) or an error.
    pub fn end(&mut self, pending: &Pending, success: bool) {
        let now = self.tick();
        self.in_flight.remove(&pending.issued);
        for sector in pending.sectors.clone() {
            let version = self.history(sector).iter_mut().find(|version| version.issued == pending.issued);
            if let Some(version) = version {
                version.ended = now;
                version.acked = if success { now } else { NEVER };
                version.failed = !success;
                if !success {
                    // Also on what a reader saw of it before it failed: the image may have taken it back.
                    version.seen = NEVER;
                }
            }
        }
    }

    /// The change was refused at once, with nothing changed.
    pub fn withdraw(&mut self, pending: &Pending) {
        self.in_flight.remove(&pending.issued);
        for sector in pending.sectors.clone() {
            self.history(sector).retain(|version| version.issued != pending.issued);
        }
    }

    /// A flush is issued; the answer goes to [`Oracle::end_flush`].
    pub fn begin_flush(&mut self) -> u64 {
        self.tick()
    }

    /// The flush issued at `issued` was answered with success.
    pub fn end_flush(&mut self, issued: u64) {
        self.flushed = self.flushed.max(issued);
    }

    /// A read is issued; the answer goes to [`Oracle::end_read`].
    pub fn begin_read(&mut self) -> u64 {
        let now = self.tick();
        *self.reads.entry(now).or_default() += 1;
        now
    }

    /// A read issued at `issued` returned `bytes` from `first_sector` on.
    ///
    /// # Errors
    /// A description of what is wrong with the bytes.
    pub fn end_read(&mut self, issued: u64, first_sector: u64, bytes: &[u8]) -> Result<(), String> {
        self.reads.remove(&issued);
        let now = self.tick();
        for (sector, bytes) in (first_sector..).zip(bytes.chunks_exact(SECTOR)) {
            let read = stamp::decode(sector, bytes);
            self.judge(sector, issued, now, read)?;
        }
        Ok(())
    }

    /// A question issued at `issued` (by [`Oracle::begin_read`]) was answered: these runs of sectors read as zeroes.
    ///
    /// # Errors
    /// A description of why they cannot be zeroes.
    pub fn end_zeroes(&mut self, issued: u64, runs: &[Range<u64>]) -> Result<(), String> {
        self.reads.remove(&issued);
        let now = self.tick();
        let mut sectors = runs.iter().cloned().flatten();
        sectors.try_for_each(|sector| self.judge(sector, issued, now, Ok(Value::Zero)))
    }

    /// A read or question ended without an answer.
    pub fn abandon_read(&mut self, issued: u64) {
        self.reads.remove(&issued);
    }

    fn judge(&mut self, sector: u64, issued: u64, now: u64, read: Result<Value, String>) -> Result<(), String> {
        let Some(versions) = self.sectors.get_mut(&sector) else {
            return match read {
                Ok(Value::Zero) => Ok(()),
                _ => Err(format!("sector {sector:#x} was never written but reads {read:?}")),
            };
        };
        let allowed = allowed(versions, issued);
        let explained = |what: &str, versions: &[Version]| {
            Err(format!("sector {sector:#x} reads {what}: {}", explain(versions, issued)))
        };
        let value = match read {
            Ok(value) => value,
            Err(garbage) => return explained(&garbage, versions),
        };
        let matching: Vec<usize> = allowed.iter().copied().filter(|at| versions[*at].value == value).collect();
        if matching.is_empty() {
            return explained(&format!("{value:?}"), versions);
        }
        if allowed.iter().any(|at| versions[*at].failed) {
            return Ok(());
        }
        if let [only] = matching[..] {
            versions[only].seen = versions[only].seen.min(now);
        }
        let quiet = versions.iter().all(|version| version.ended < issued);
        if quiet && allowed.len() > 1 {
            let fua = versions.iter().all(|version| version.issued < self.cut);
            let (issued, ended, acked, seen) = (now, now, now, now);
            let (discard, failed, again) = (false, false, false);
            versions.push(Version { value, issued, ended, acked, seen, fua, discard, failed, again });
        }
        Ok(())
    }

    /// The run was interrupted; nothing is in flight any more.
    pub fn crash(&mut self, crash: Crash) {
        let now = self.tick();
        self.reads.clear();
        for pending in std::mem::take(&mut self.in_flight).into_values() {
            for sector in pending.sectors.clone() {
                let mine = |version: &&mut Version| version.issued == pending.issued;
                if let Some(version) = self.history(sector).iter_mut().find(mine) {
                    version.ended = now;
                }
            }
        }
        if crash == Crash::PowerCut {
            let flushed = self.flushed;
            self.sectors.values_mut().for_each(|versions| cut(versions, flushed));
            self.cut = self.tick();
        }
    }

    /// The disk holds from now on, durably, what `to` tells of: what it was at an earlier time, when nothing was in flight any more. Requests in flight have
    /// not begun to take effect.
    pub fn go_back(&mut self, to: &Self) {
        let now = self.tick();
        let sectors: BTreeSet<u64> = self.sectors.keys().chain(to.sectors.keys()).copied().collect();
        for sector in sectors {
            let waiting: Vec<_> = self.history(sector).extract_if(.., |version| version.ended == NEVER).collect();
            // What waits comes behind what the disk holds from now on.
            let now = waiting.iter().map(|version| version.issued).min().map_or(now, |first| first - 1);
            let there = to.sectors.get(&sector).map_or_else(Vec::new, |versions| {
                let allowed = allowed(versions, to.now + 1);
                allowed.iter().map(|at| versions[*at].clone()).collect()
            });
            let is_known = there.len() < 2;
            let version = |value: Value, failed: bool| Version {
                value,
                issued: now,
                ended: now,
                acked: if is_known { now } else { NEVER },
                seen: NEVER,
                fua: true,
                discard: false,
                failed,
                again: false,
            };
            let mut versions: Vec<_> = there.iter().map(|one| version(one.value, one.failed)).collect();
            if versions.is_empty() {
                versions.push(version(Value::Zero, false));
            }
            self.sectors.insert(sector, versions.into_iter().chain(waiting).collect());
        }
    }

    /// What is in flight ends with an error: nobody may rely on either content of its sectors.
    pub fn fail_in_flight(&mut self) {
        self.reads.clear();
        for pending in std::mem::take(&mut self.in_flight).into_values() {
            self.end(&pending, false);
        }
    }

    /// Runs of sectors that were ever written, each at most `max_sectors` long.
    pub fn touched(&self, max_sectors: u64) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for &sector in self.sectors.keys() {
            match runs.last_mut() {
                Some(run) if run.end == sector && run.end - run.start < max_sectors => run.end += 1,
                _ => runs.push(sector..sector + 1),
            }
        }
        runs
    }
}

/// The versions that a read that began at `start` may return.
fn allowed(versions: &[Version], start: u64) -> Vec<usize> {
    let replaced = |v: &Version| versions.iter().any(|w| v.over() < w.issued && w.certain() < start);
    (0..versions.len()).filter(|at| !replaced(&versions[*at])).collect()
}

/// A power cut: what is not durable becomes uncertain, what a durable version replaced is gone.
fn cut(versions: &mut Vec<Version>, flushed: u64) {
    let durable: Vec<u64> = versions.iter().filter(|v| is_durable(v, versions, flushed)).map(|v| v.issued).collect();
    versions.retain(|v| !durable.iter().any(|issued| v.over() < *issued));
    for version in versions {
        version.ended = version.over();
        if durable.contains(&version.issued) {
            version.fua = true;
        } else {
            (version.acked, version.seen, version.fua) = (NEVER, NEVER, false);
        }
    }
}

fn explain(versions: &[Version], start: u64) -> String {
    let allowed = allowed(versions, start);
    let show = |at: u64| if at == NEVER { "-".to_owned() } else { at.to_string() };
    let line = |(at, v): (usize, &Version)| {
        let (issued, acked, ended, seen) = (v.issued, show(v.acked), show(v.ended), show(v.seen));
        let kind = if v.discard { " discard" } else { "" };
        let may = if allowed.contains(&at) { "allowed " } else { "replaced" };
        format!("\n    {may} {:?}{kind} issued {issued} acked {acked} ended {ended} seen {seen} fua {}", v.value, v.fua)
    };
    let lines: String = versions.iter().enumerate().map(line).collect();
    format!("begun at {start}; versions:{lines}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(sector: u64, value: Value) -> Vec<u8> {
        let mut bytes = vec![0; SECTOR];
        if let Value::Stamp(write) = value {
            stamp::stamp(sector, write, &mut bytes);
        }
        bytes
    }

    /// Reads sector 0 in an instant.
    fn read(oracle: &mut Oracle, value: Value) -> bool {
        let issued = oracle.begin_read();
        oracle.end_read(issued, 0, &bytes(0, value)).is_ok()
    }

    fn write(oracle: &mut Oracle) -> Value {
        let pending = oracle.begin(0..1, Change::Data, false);
        oracle.end(&pending, true);
        Value::Stamp(pending.write)
    }

    fn flush(oracle: &mut Oracle) {
        let issued = oracle.begin_flush();
        oracle.end_flush(issued);
    }

    #[test]
    fn an_answered_write_replaces_what_was_there() {
        let mut oracle = Oracle::default();
        assert!(read(&mut oracle, Value::Zero));
        let first = write(&mut oracle);
        let second = write(&mut oracle);
        assert!(!read(&mut oracle, Value::Zero) && !read(&mut oracle, first));
        assert!(read(&mut oracle, second) && !read(&mut oracle, Value::Stamp(99)));
    }

    #[test]
    fn a_write_in_flight_may_show_or_not_but_not_vanish_again() {
        let mut oracle = Oracle::default();
        let old = write(&mut oracle);
        let pending = oracle.begin(0..1, Change::Data, false);
        assert!(read(&mut oracle, old) && read(&mut oracle, Value::Stamp(pending.write)));
        assert!(!read(&mut oracle, old));
    }

    #[test]
    fn death_keeps_what_was_answered_and_settles_what_was_not() {
        let mut oracle = Oracle::default();
        let old = write(&mut oracle);
        let pending = oracle.begin(0..1, Change::Data, false);
        oracle.crash(Crash::Death);
        assert!(!read(&mut oracle, Value::Zero));
        assert!(read(&mut oracle, old));
        assert!(!read(&mut oracle, Value::Stamp(pending.write)));
        oracle.crash(Crash::Death);
        assert!(!read(&mut oracle, Value::Stamp(pending.write)) && read(&mut oracle, old));
    }

    #[test]
    fn a_discard_is_as_durable_as_the_write_that_it_met() {
        for is_answered in [false, true] {
            let mut oracle = Oracle::default();
            let old = write(&mut oracle);
            flush(&mut oracle);
            let pending = oracle.begin(0..1, Change::Data, false);
            let discard = oracle.begin(0..1, Change::Discard, false);
            oracle.end(&discard, true);
            if is_answered {
                oracle.end(&pending, true);
            }
            flush(&mut oracle);
            assert!(read(&mut oracle, Value::Zero));
            oracle.crash(Crash::PowerCut);
            assert_eq!(read(&mut oracle, old), !is_answered);
        }
    }

    #[test]
    fn what_is_tried_again_may_come_after_what_was_written_meanwhile() {
        for again in [false, true] {
            let mut oracle = Oracle::default();
            write(&mut oracle);
            oracle.tries_again(again);
            let zeroes = oracle.begin(0..1, Change::Zeroes, false);
            assert!(read(&mut oracle, Value::Zero));
            write(&mut oracle);
            oracle.end(&zeroes, true);
            assert_eq!(read(&mut oracle, Value::Zero), again);
        }
    }

    #[test]
    fn a_power_cut_may_lose_what_no_flush_covered() {
        let make = || {
            let mut oracle = Oracle::default();
            let lost = write(&mut oracle);
            let flushed = write(&mut oracle);
            flush(&mut oracle);
            let late = write(&mut oracle);
            oracle.crash(Crash::PowerCut);
            (oracle, [lost, flushed, late])
        };
        let judged = |at: usize| {
            let (mut oracle, values) = make();
            read(&mut oracle, values[at])
        };
        assert_eq!([0, 1, 2].map(judged), [false, true, true]);
        let (mut oracle, [_, flushed, late]) = make();
        assert!(read(&mut oracle, flushed) && !read(&mut oracle, late));
        oracle.crash(Crash::PowerCut);
        assert!(!read(&mut oracle, late) && read(&mut oracle, flushed));
    }

    #[test]
    fn after_a_death_what_was_read_is_not_yet_durable() {
        let mut oracle = Oracle::default();
        let kept = write(&mut oracle);
        flush(&mut oracle);
        let late = write(&mut oracle);
        oracle.crash(Crash::Death);
        assert!(read(&mut oracle, late));
        oracle.crash(Crash::PowerCut);
        assert!(read(&mut oracle, kept));
    }

    #[test]
    fn a_fua_write_is_durable_and_a_flush_covers_only_what_was_answered_before() {
        let mut oracle = Oracle::default();
        let first = oracle.begin(0..1, Change::Data, true);
        oracle.end(&first, true);
        let flush = oracle.begin_flush();
        let late = write(&mut oracle);
        oracle.end_flush(flush);
        oracle.crash(Crash::PowerCut);
        assert!(!read(&mut oracle, Value::Zero));
        assert!(read(&mut oracle, Value::Stamp(first.write)) && !read(&mut oracle, late));
    }

    #[test]
    fn a_discard_may_do_nothing_but_not_change_its_mind() {
        for first in [true, false] {
            let mut oracle = Oracle::default();
            let old = write(&mut oracle);
            let discard = oracle.begin(0..1, Change::Discard, false);
            oracle.end(&discard, true);
            let (shown, other) = if first { (old, Value::Zero) } else { (Value::Zero, old) };
            assert!(read(&mut oracle, shown));
            assert!(!read(&mut oracle, other) && read(&mut oracle, shown));
        }
    }

    #[test]
    fn after_a_failed_write_old_and_new_may_show_until_the_next() {
        let mut oracle = Oracle::default();
        let old = write(&mut oracle);
        let failed = oracle.begin(0..1, Change::Data, false);
        oracle.end(&failed, false);
        assert!(read(&mut oracle, Value::Stamp(failed.write)) && read(&mut oracle, old));
        write(&mut oracle);
        assert!(!read(&mut oracle, Value::Stamp(failed.write)) && !read(&mut oracle, old));
    }

    #[test]
    fn misplaced_content_is_garbage() {
        let mut oracle = Oracle::default();
        let written = write(&mut oracle);
        let issued = oracle.begin_read();
        assert!(oracle.end_read(issued, 1, &bytes(0, written)).is_err());
    }

    #[test]
    fn long_histories_are_pruned_without_changing_the_verdict() {
        let mut oracle = Oracle::default();
        let values: Vec<Value> = (0..40)
            .map(|_| {
                flush(&mut oracle);
                write(&mut oracle)
            })
            .collect();
        assert!(oracle.sectors[&0].len() < 10);
        oracle.crash(Crash::PowerCut);
        assert!(!read(&mut oracle, values[37]) && read(&mut oracle, values[38]));
    }
}
