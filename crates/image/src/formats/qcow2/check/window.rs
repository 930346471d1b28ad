//! References to host clusters, counted for a part of the file at a time, and compared with the refcounts that the image
//! keeps.

use std::ops::Range;

use crate::check::{Finding, Mend, Report, Severity};

/// How many clusters are counted at a time: 80 MiB of memory, 1 TiB of an image with clusters of 64 KiB.
pub(super) const WINDOW_CLUSTERS: u64 = 16 << 20;
/// How many counters are looked through at a time.
const PART_CLUSTERS: usize = 64 << 10;
/// How many findings are told one by one.
const MOST_FINDINGS: usize = 1000;

/// What refers to a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum User {
    /// The header, an L1 table, the snapshot table, bitmaps, a LUKS header.
    Metadata,
    /// A refcount table or block: a repair makes new ones.
    Refcounts,
    /// An L2 table. Snapshots share them.
    L2,
    /// Data of the guest. Snapshots share them, and several compressed clusters lie in one host cluster.
    Data,
}

impl User {
    fn bit(self) -> u8 {
        match self {
            Self::Metadata => 1,
            Self::L2 => 2,
            Self::Data => 4,
            Self::Refcounts => 8,
        }
    }

    /// The users that may refer to the same cluster as this one: a bit for each.
    fn may_share_with(self) -> u8 {
        match self {
            Self::Metadata | Self::Refcounts => 0,
            Self::L2 | Self::Data => self.bit(),
        }
    }
}

/// A report whose length is bounded, however much is wrong.
pub(super) struct Findings {
    pub report: Report,
    /// Clusters that a flag calls zero.
    pub zero_clusters: u64,
    /// The first entry that claims space past the end of the file.
    pub claims_past_end: Option<u64>,
    left_out: u64,
    worst_left_out: Option<Severity>,
    can_mend_left_out: bool,
}

impl Default for Findings {
    fn default() -> Self {
        let report = Report::default();
        let (zero_clusters, claims_past_end, left_out, worst_left_out) = Default::default();
        Self { report, zero_clusters, claims_past_end, left_out, worst_left_out, can_mend_left_out: true }
    }
}

impl Findings {
    pub(super) fn add(
        &mut self,
        severity: Severity,
        offset: impl Into<Option<u64>>,
        mend: Mend,
        message: impl Into<String>,
    ) {
        if self.report.findings.len() < MOST_FINDINGS {
            return self.report.add(severity, offset, mend, message);
        }
        self.left_out += 1;
        self.worst_left_out = self.worst_left_out.max(Some(severity));
        self.can_mend_left_out &= mend == Mend::Repair;
    }

    pub(super) fn corruption(&mut self, offset: impl Into<Option<u64>>, mend: Mend, message: impl Into<String>) {
        self.add(Severity::Corruption, offset, mend, message);
    }

    pub(super) fn finish(mut self) -> Report {
        if let Some(severity) = self.worst_left_out {
            let message = format!("{} more findings are not listed", self.left_out);
            let mend = if self.can_mend_left_out { Mend::Repair } else { Mend::No };
            self.report.findings.push(Finding { severity, message, offset_bytes: None, mend });
        }
        self.report
    }
}

/// The clusters from number `first`, as many as there are counters.
pub(super) struct Window {
    pub first: u64,
    cluster_bits: u32,
    /// References that were found; 65535 stands for that many or more.
    found: Vec<u16>,
    /// Refcounts of the image; 65535 stands for that many or more.
    stored: Vec<u16>,
    users: Vec<u8>,
    /// Where the run of equal counts begins at which a comparison is.
    run_start: usize,
}

impl Window {
    pub(super) fn new(first: u64, clusters: u64, cluster_bits: u32) -> Self {
        let len = clusters as usize;
        let (found, stored, users) = (vec![0; len], vec![0; len], vec![0; len]);
        Self { first, cluster_bits, found, stored, users, run_start: 0 }
    }

    fn index(&self, offset: u64) -> Option<usize> {
        let at = (offset >> self.cluster_bits).checked_sub(self.first)?;
        (at < self.found.len() as u64).then_some(at as usize)
    }

    /// One past the last cluster's number.
    pub(super) fn end(&self) -> u64 {
        self.first + self.found.len() as u64
    }

    /// Notes what the image says of a cluster.
    pub(super) fn store(&mut self, cluster: u64, count: u64) {
        if let Some(index) = self.index(cluster << self.cluster_bits) {
            self.stored[index] = count.min(u64::from(u16::MAX)) as u16;
        }
    }

    /// The refcount of the cluster at `offset`, if that is in the window.
    pub(super) fn stored(&self, offset: u64) -> Option<u16> {
        self.index(offset).map(|index| self.stored[index])
    }

    /// How many references to the cluster at `offset` were found, if that is in the window.
    pub(super) fn found(&self, offset: u64) -> Option<u16> {
        self.index(offset).map(|index| self.found[index])
    }

    /// The window in parts, none of which takes long to look through: runs of its counters.
    pub(super) fn parts(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let len = self.found.len();
        (0..len).step_by(PART_CLUSTERS).map(move |start| start..len.min(start + PART_CLUSTERS))
    }

    /// The first cluster of a part, of guest data or of an L2 table, whose refcount and the references that were found are more than `most`
    /// together.
    pub(super) fn first_full(&self, part: &Range<usize>, most: u32) -> Option<u64> {
        let counted = User::L2.bit() | User::Data.bit();
        let is_full = |index: &usize| {
            let sum = u32::from(self.stored[*index]) + u32::from(self.found[*index]);
            self.users[*index] & counted != 0 && sum > most
        };
        part.clone().find(is_full).map(|index| self.first + index as u64)
    }

    /// The first cluster of a part that has more references than `most`.
    pub(super) fn first_over(&self, part: &Range<usize>, most: u16) -> Option<u64> {
        let found = self.found[part.clone()].iter().position(|found| *found > most);
        found.map(|index| self.first + (part.start + index) as u64)
    }

    /// One past the last cluster of a part that has a reference; 0 when none has.
    pub(super) fn used_end(&self, part: &Range<usize>) -> u64 {
        let found = self.found[part.clone()].iter().rposition(|found| *found > 0);
        found.map_or(0, |index| self.first + (part.start + index) as u64 + 1)
    }

    /// Counts a reference to each cluster of `len_bytes` from `offset`, as far as they are in the window.
    pub(super) fn refer(&mut self, offset: u64, len_bytes: u64, user: User, findings: &mut Findings) {
        let last = offset.saturating_add(len_bytes.max(1) - 1) >> self.cluster_bits;
        let first = (offset >> self.cluster_bits).max(self.first);
        for cluster in first..(last + 1).min(self.end()) {
            let index = (cluster - self.first) as usize;
            self.found[index] = self.found[index].saturating_add(1);
            if self.users[index] & !user.may_share_with() != 0 {
                let message = format!("{} overlaps {}", name(user.bit()), name(self.users[index]));
                let mend = if is_about_refcounts(user, self.users[index]) { Mend::Repair } else { Mend::No };
                findings.corruption(cluster << self.cluster_bits, mend, message);
            }
            self.users[index] |= user.bit();
        }
    }

    /// Compares what was found in a part with what the image says: the parts one after the other, in their order. A run of wrong counts is told
    /// as a whole, when it ends.
    pub(super) fn compare(&mut self, part: Range<usize>, findings: &mut Findings) {
        for at in part.clone() {
            if self.counts(at) != self.counts(self.run_start) {
                self.tell(self.run_start, at, findings);
                self.run_start = at;
            }
        }
        if part.end == self.found.len() {
            self.tell(self.run_start, part.end, findings);
        }
    }

    fn counts(&self, index: usize) -> (u16, u16) {
        (self.found[index], self.stored[index])
    }

    /// Adds a finding for the clusters `at..end`, which have the same counts, if these are wrong.
    fn tell(&self, at: usize, end: usize, findings: &mut Findings) {
        let ((found, stored), count) = (self.counts(at), (end - at) as u64);
        if found == stored {
            return;
        }
        let offset = (self.first + at as u64) << self.cluster_bits;
        let which = match count {
            1 => "a cluster has".to_owned(),
            _ => format!("{count} clusters in a row have"),
        };
        let message = format!("{which} refcount {stored}, but {found} references");
        match found < stored {
            true => {
                findings.report.leaked_bytes += if found == 0 { count << self.cluster_bits } else { 0 };
                findings.add(Severity::Leak, offset, Mend::Repair, message);
            }
            false => findings.corruption(offset, Mend::Repair, message),
        }
    }
}

/// True when the two would not meet without refcounts, which a repair makes anew.
fn is_about_refcounts(user: User, others: u8) -> bool {
    user == User::Refcounts || others & !user.may_share_with() == User::Refcounts.bit()
}

fn name(users: u8) -> &'static str {
    match users {
        _ if users & (User::Metadata.bit() | User::Refcounts.bit()) != 0 => "the image's own metadata",
        _ if users & User::L2.bit() != 0 => "an L2 table",
        _ => "guest data",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window() -> (Window, Findings) {
        (Window::new(4, 8, 16), Findings::default())
    }

    #[test]
    fn only_what_lies_in_the_window_is_counted() {
        let (mut window, mut findings) = window();
        window.refer(0, 20 << 16, User::Data, &mut findings);
        assert_eq!(window.found, [1; 8]);
        window.refer(11 << 16, 2, User::Data, &mut findings);
        window.refer(12 << 16, 2, User::Data, &mut findings);
        assert_eq!((window.found[7], findings.report.findings.len()), (2, 0));
        assert_eq!((window.stored(3 << 16), window.stored(12 << 16), window.end()), (None, None, 12));
    }

    #[test]
    fn metadata_bear_no_one_beside_them() {
        let (mut window, mut findings) = window();
        window.refer(5 << 16, 1, User::Metadata, &mut findings);
        window.refer(6 << 16, 1, User::L2, &mut findings);
        window.refer(6 << 16, 1, User::L2, &mut findings);
        assert!(findings.report.findings.is_empty());
        window.refer(5 << 16, 1, User::Data, &mut findings);
        window.refer(6 << 16, 1, User::Data, &mut findings);
        let messages: Vec<_> = findings.report.findings.iter().map(|f| &f.message[..]).collect();
        assert_eq!(messages, ["guest data overlaps the image's own metadata", "guest data overlaps an L2 table"]);
    }

    #[test]
    fn counts_too_high_are_leaks_and_too_low_are_corruption() {
        let (mut window, mut findings) = window();
        window.refer(4 << 16, 2 << 16, User::Data, &mut findings);
        for (cluster, count) in [(4, 1), (5, 0), (6, 3), (7, 3), (9, 70_000), (99, 1)] {
            window.store(cluster, count);
        }
        window.parts().for_each(|part| window.compare(part, &mut findings));
        let report = findings.finish();
        let told: Vec<_> = report.findings.iter().map(|f| (f.severity, f.offset_bytes.unwrap() >> 16)).collect();
        assert_eq!(told, [(Severity::Corruption, 5), (Severity::Leak, 6), (Severity::Leak, 9)]);
        assert_eq!(report.leaked_bytes, 3 << 16);
    }

    #[test]
    fn a_cluster_is_full_when_its_count_has_no_room_for_what_was_found() {
        let (mut window, mut findings) = window();
        for (cluster, user, references) in
            [(4, User::Refcounts, 3), (5, User::Data, 1), (6, User::L2, 1), (7, User::Data, 2)]
        {
            (0..references).for_each(|_| window.refer(cluster << 16, 1, user, &mut findings));
            window.store(cluster, 2);
        }
        let first_full = |most| window.parts().find_map(|part| window.first_full(&part, most));
        assert_eq!((first_full(3), first_full(2), first_full(4)), (Some(7), Some(5), None));
    }

    #[test]
    fn a_report_stays_short() {
        let mut findings = Findings::default();
        (0..MOST_FINDINGS).for_each(|_| findings.add(Severity::Leak, None, Mend::Repair, "x"));
        findings.corruption(None, Mend::No, "y");
        let report = findings.finish();
        assert_eq!((report.findings.len(), report.worst()), (MOST_FINDINGS + 1, Some(Severity::Corruption)));
    }
}
