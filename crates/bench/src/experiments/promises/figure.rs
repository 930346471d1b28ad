//! The lines and their figures: what is promised of each, and by which rounds it is judged.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A promise on the life of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Line {
    /// A clone of a large disk, and its first answer.
    Clone,
    /// A snapshot is deleted, and its space comes back.
    Delete,
    /// Four merges at a time.
    FourMerges,
    /// A merge whose server is killed.
    KilledMerge,
    /// A copy on another host that stays in step.
    Mirror,
    /// A disk goes to another host while its guest runs.
    HandOver,
    /// The link to the other host is cut, and comes back.
    LinkCut,
    /// A disk goes to another host and comes back.
    ReturnTrip,
    /// The target of a backup stops answering.
    HungBackup,
    /// A limit is changed, a job is cancelled.
    Changes,
    /// A snapshot of a disk of which nothing is in memory.
    ColdSnapshot,
    /// Copies of a sparse disk.
    Sparse,
}

impl Line {
    /// All of them, in their order.
    pub const ALL: [Self; 12] = [
        Self::Clone,
        Self::Delete,
        Self::FourMerges,
        Self::KilledMerge,
        Self::Mirror,
        Self::HandOver,
        Self::LinkCut,
        Self::ReturnTrip,
        Self::HungBackup,
        Self::Changes,
        Self::ColdSnapshot,
        Self::Sparse,
    ];

    /// Its name, on the command line and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Clone => "clone",
            Self::Delete => "delete",
            Self::FourMerges => "four-merges",
            Self::KilledMerge => "killed-merge",
            Self::Mirror => "mirror",
            Self::HandOver => "hand-over",
            Self::LinkCut => "link-cut",
            Self::ReturnTrip => "return-trip",
            Self::HungBackup => "hung-backup",
            Self::Changes => "changes",
            Self::ColdSnapshot => "cold-snapshot",
            Self::Sparse => "sparse",
        }
    }
}

/// What is measured of a line. Names end in the unit, or in `ratio`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Figure {
    /// `spile clone` of an image that nobody writes.
    CloneMs,
    /// The same, served by a server that runs, up to the first answer to a client.
    CloneFirstAnswerMs,
    /// `spile clone` of a disk in use, up to the first answer.
    CloneOfADiskInUseMs,
    /// `spile delete`.
    DeleteMs,
    /// `spile gc`, until the image is gone.
    DeleteSpaceS,
    /// A guest's p99 meanwhile, by that without.
    DeleteP99Ratio,
    /// Merges that were at work at the same time.
    MergesAtOnce,
    /// What all of them move in a second.
    MergesMibPerS,
    /// Their guests' p99, by that without.
    MergesP99Ratio,
    /// Work that was done again after a kill, by the rate of the merge.
    KilledMergeAgainS,
    /// From the start of the next server until the merge goes on.
    KilledMergeGoesOnMs,
    /// What a mirror takes of the requests of a guest: 4 KiB here and there, 70 reads of a hundred.
    MirrorCostSmallRatio,
    /// What it takes of the writes of a guest: 256 KiB, one after the other.
    MirrorCostLargeRatio,
    /// For which part of the run with writes of 256 KiB the mirror was in step.
    MirrorInStepRatio,
    /// The most that the copy lacked during the writes of 256 KiB.
    MirrorLagMib,
    /// The longest time by which it was late then.
    MirrorLagMs,
    /// The longest time for which requests waited for the hand-over.
    HandOverMs,
    /// A guest's longest request in a run with a move, less that of one without.
    HandOverLongestMs,
    /// What was sent after the link was back, by what had changed since it was cut.
    LinkCutSentRatio,
    /// What was sent after the link was back.
    LinkCutSentMib,
    /// A guest's p99 while the link was cut, by that before.
    LinkCutP99Ratio,
    /// What was sent on the way back, by what had changed.
    ReturnTripSentRatio,
    /// What was sent on the way back, by the size of the disk.
    ReturnTripOfDiskRatio,
    /// A guest's p99 beside a backup whose target hangs, by that without a backup.
    HungBackupP99Ratio,
    /// Until a new limit holds.
    LimitHoldsMs,
    /// Until a limit is gone.
    LimitGoneMs,
    /// From the cancel of a merge to its end.
    CancelMergeMs,
    /// The same of a flatten.
    CancelFlattenMs,
    /// The same of a move.
    CancelMoveMs,
    /// The same of a backup.
    CancelBackupMs,
    /// A guest's longest request with a snapshot, less that without.
    ColdSnapshotLongerMs,
    /// For how long the snapshot kept requests waiting.
    ColdSnapshotStallMs,
    /// What a copy takes at its target, by what the source takes: `spile convert`, raw to raw.
    SparseRawRatio,
    /// `spile convert`, raw to VHD.
    SparseVhdRatio,
    /// `spile backup`, raw to raw.
    SparseBackupRatio,
    /// `spile move`, raw to raw.
    SparseMoveRatio,
}

/// What is told of a figure.
#[derive(Clone, Copy, Debug)]
pub(super) struct About {
    pub(super) line: Line,
    /// What it is, for tables.
    pub(super) what: &'static str,
    pub(super) unit: &'static str,
    /// The most that is promised, or the least.
    pub(super) promised: Option<f64>,
    /// More is better.
    pub(super) is_least: bool,
    /// It is judged by the median of the rounds: it sets a guest's runs beside each other, and the host's other work is in each.
    pub(super) by_median: bool,
}

/// A guest is untouched when its p99 is within a quarter of the one without: two runs without anything differ by that much.
const UNTOUCHED: f64 = 1.25;
/// Only what has changed is sent. The rest is for the heads of requests, and notes.
const ONLY_CHANGED: f64 = 1.1;
/// A copy takes no more than its source. The rest is for tables.
const NO_MORE: f64 = 1.1;

/// A figure of which nothing is promised.
fn told(line: Line, what: &'static str, unit: &'static str) -> About {
    About { line, what, unit, promised: None, is_least: false, by_median: false }
}

/// One that is promised to be so in every round.
fn at_most(line: Line, what: &'static str, unit: &'static str, most: f64) -> About {
    About { promised: Some(most), ..told(line, what, unit) }
}

/// One that sets a guest's runs beside each other.
fn of_runs(line: Line, what: &'static str, unit: &'static str, most: f64) -> About {
    About { by_median: true, ..at_most(line, what, unit, most) }
}

impl About {
    /// True when `one` is worse than `other`.
    pub(super) fn is_worse(&self, one: f64, other: f64) -> bool {
        if self.is_least { one < other } else { one > other }
    }
}

impl Figure {
    /// What is told of it.
    pub(super) fn about(self) -> About {
        use Line::*;
        match self {
            Self::CloneMs => told(Clone, "the command", "ms"),
            Self::CloneFirstAnswerMs => at_most(Clone, "from the order to the first answer", "ms", 50.0),
            Self::CloneOfADiskInUseMs => at_most(Clone, "the same of a disk in use", "ms", 50.0),
            Self::DeleteMs => at_most(Delete, "the command returns", "ms", 100.0),
            Self::DeleteSpaceS => told(Delete, "until gc has freed the space", "s"),
            Self::DeleteP99Ratio => of_runs(Delete, "guest's p99 meanwhile, by before", "times", 2.0),
            Self::MergesAtOnce => {
                About { is_least: true, ..at_most(FourMerges, "merges at work at the same time", "times", 4.0) }
            }
            Self::MergesMibPerS => told(FourMerges, "all of them together", "MiB/s"),
            Self::MergesP99Ratio => of_runs(FourMerges, "guests' p99 meanwhile, by before", "times", 2.0),
            Self::KilledMergeAgainS => at_most(KilledMerge, "work done again after kill -9", "s", 1.0),
            Self::KilledMergeGoesOnMs => told(KilledMerge, "start of the next server until it goes on", "ms"),
            Self::MirrorCostSmallRatio => of_runs(Mirror, "taken of a guest's requests, 4 KiB, 70/30", "times", 0.15),
            Self::MirrorCostLargeRatio => of_runs(Mirror, "taken of a guest's writes of 256 KiB", "times", 0.15),
            Self::MirrorInStepRatio => told(Mirror, "part of the time in step beside them", "times"),
            Self::MirrorLagMib => told(Mirror, "most lag beside them", "MiB"),
            Self::MirrorLagMs => told(Mirror, "longest lag", "ms"),
            Self::HandOverMs => at_most(HandOver, "requests wait for the hand-over", "ms", 100.0),
            Self::HandOverLongestMs => told(HandOver, "guest's longest request, longer by", "ms"),
            Self::LinkCutSentRatio => at_most(LinkCut, "sent again, by what has changed", "times", ONLY_CHANGED),
            Self::LinkCutSentMib => told(LinkCut, "sent again", "MiB"),
            Self::LinkCutP99Ratio => of_runs(LinkCut, "guest's p99 meanwhile, by before", "times", UNTOUCHED),
            Self::ReturnTripSentRatio => at_most(ReturnTrip, "sent, by what has changed", "times", ONLY_CHANGED),
            Self::ReturnTripOfDiskRatio => told(ReturnTrip, "sent, by all of the disk", "times"),
            Self::HungBackupP99Ratio => of_runs(HungBackup, "guest's p99, by without a backup", "times", UNTOUCHED),
            Self::LimitHoldsMs => at_most(Changes, "until a new limit holds", "ms", 100.0),
            Self::LimitGoneMs => at_most(Changes, "until a limit is gone", "ms", 100.0),
            Self::CancelMergeMs => at_most(Changes, "from the cancel of a merge to its end", "ms", 100.0),
            Self::CancelFlattenMs => at_most(Changes, "of a flatten", "ms", 100.0),
            Self::CancelMoveMs => at_most(Changes, "of a move", "ms", 100.0),
            Self::CancelBackupMs => at_most(Changes, "of a backup", "ms", 100.0),
            Self::ColdSnapshotLongerMs => of_runs(ColdSnapshot, "guest's longest request, longer by", "ms", 1.0),
            Self::ColdSnapshotStallMs => told(ColdSnapshot, "requests wait for the snapshot", "ms"),
            Self::SparseRawRatio => at_most(Sparse, "space by the source's, convert to raw", "times", NO_MORE),
            Self::SparseVhdRatio => at_most(Sparse, "space by the source's, convert to VHD", "times", NO_MORE),
            Self::SparseBackupRatio => at_most(Sparse, "space by the source's, backup to raw", "times", NO_MORE),
            Self::SparseMoveRatio => at_most(Sparse, "space by the source's, move to raw", "times", NO_MORE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_one_name() {
        for line in Line::ALL {
            assert_eq!(serde_json::to_value(line).unwrap(), line.name());
        }
    }
}
