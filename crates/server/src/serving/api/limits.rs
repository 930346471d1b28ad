//! Limits as the control API tells and takes them.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result};
use utoipa::ToSchema;

/// How many requests and bytes may pass in a second. What is left out is not limited.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Limits {
    /// Requests in a second, of all kinds but flushes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Reads in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<u64>,
    /// Writes in a second; discards and writes of zeroes count as writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<u64>,
    /// Bytes read and written in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bps: Option<u64>,
    /// Bytes read in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bps: Option<u64>,
    /// Bytes written in a second, zeroes included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_bps: Option<u64>,
    /// How long unused allowance adds up, in seconds. Left out: 0.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst_s: Option<f64>,
}

impl From<spile_node::Limits> for Limits {
    fn from(limits: spile_node::Limits) -> Self {
        // No field can be forgotten here.
        let spile_node::Limits { iops, read_iops, write_iops, bps, read_bps, write_bps, burst } = limits;
        let burst_s = burst.map(|burst| burst.as_secs_f64());
        Self { iops, read_iops, write_iops, bps, read_bps, write_bps, burst_s }
    }
}

impl Limits {
    /// The same as the node has them.
    ///
    /// # Errors
    /// `InvalidInput` when they cannot be kept.
    pub fn for_node(&self) -> Result<spile_node::Limits> {
        let Self { iops, read_iops, write_iops, bps, read_bps, write_bps, burst_s } = self.clone();
        let burst = burst_s.map(Duration::try_from_secs_f64).transpose();
        let burst = burst.map_err(|_| Error::new(ErrorKind::InvalidInput, "burst_s is no length of time"))?;
        let limits = spile_node::Limits { iops, read_iops, write_iops, bps, read_bps, write_bps, burst };
        limits.check().map(|()| limits)
    }

    /// As [`Self::for_node`], of limits that another server had. One that took a shorter burst kept the shortest there is.
    ///
    /// # Errors
    /// As there.
    pub fn kept(&self) -> Result<spile_node::Limits> {
        let least_s = spile_node::Limits::LEAST_BURST.as_secs_f64();
        Self { burst_s: self.burst_s.map(|burst_s| burst_s.max(least_s)), ..self.clone() }.for_node()
    }
}

/// What limits a disk, and what that has delayed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskLimits {
    /// The disk's own limits.
    pub own: Limits,
    /// The group that the disk is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupLimits>,
    /// What a job that works on the disk allows its guests meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<Limits>,
    /// Requests that limits have delayed since the server began.
    pub delayed_requests: u64,
    /// How long these have waited, all together, in seconds. Those that wait now are not in it.
    pub delayed_s: f64,
    /// Requests that wait for a limit now.
    pub waiting_requests: u64,
}

/// A group of disks, and the limits that they share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GroupLimits {
    /// The group's name.
    pub name: String,
    /// How many disks are in it.
    pub disk_count: u64,
    /// What they may do together.
    pub limits: Limits,
}

impl From<&spile_node::Group> for GroupLimits {
    fn from(group: &spile_node::Group) -> Self {
        Self { name: group.name().to_owned(), disk_count: group.disks() as u64, limits: group.limits().into() }
    }
}

impl From<&spile_node::DiskLimits> for DiskLimits {
    fn from(limits: &spile_node::DiskLimits) -> Self {
        let delays = limits.delays();
        Self {
            own: limits.own().into(),
            group: limits.group().map(|group| GroupLimits::from(&*group)),
            job: Some(limits.job()).filter(|job| !job.is_none()).map(Limits::from),
            delayed_requests: delays.requests,
            delayed_s: delays.time_ns as f64 / 1e9,
            waiting_requests: delays.waiting,
        }
    }
}

/// The groups of a server.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct GroupList {
    /// Each group, by name.
    pub groups: Vec<GroupLimits>,
}

/// A change of the limits of a disk or of a group. What is left out stays as it is; 0 takes a limit away.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeLimits {
    /// Takes all limits away before the others of this change are set.
    #[serde(default)]
    pub off: bool,
    /// Requests in a second, of all kinds but flushes.
    #[serde(default)]
    pub iops: Option<u64>,
    /// Reads in a second.
    #[serde(default)]
    pub read_iops: Option<u64>,
    /// Writes in a second; discards and writes of zeroes count as writes.
    #[serde(default)]
    pub write_iops: Option<u64>,
    /// Bytes read and written in a second.
    #[serde(default)]
    pub bps: Option<u64>,
    /// Bytes read in a second.
    #[serde(default)]
    pub read_bps: Option<u64>,
    /// Bytes written in a second, zeroes included.
    #[serde(default)]
    pub write_bps: Option<u64>,
    /// How long unused allowance adds up, in seconds: from 0.01 to 3600.
    #[serde(default)]
    pub burst_s: Option<f64>,
    /// Only for a disk: the group that it is in from now on, which is made if there is none of that name; empty: no group.
    #[serde(default)]
    pub group: Option<String>,
}

impl ChangeLimits {
    /// The limits that become of `limits`.
    ///
    /// # Errors
    /// `InvalidInput` when they cannot be kept.
    pub fn applied_to(&self, limits: spile_node::Limits) -> Result<spile_node::Limits> {
        let before = if self.off { Limits::default() } else { limits.into() };
        let number = |new: Option<u64>, old: Option<u64>| match new {
            Some(0) => None,
            Some(new) => Some(new),
            None => old,
        };
        let after = Limits {
            iops: number(self.iops, before.iops),
            read_iops: number(self.read_iops, before.read_iops),
            write_iops: number(self.write_iops, before.write_iops),
            bps: number(self.bps, before.bps),
            read_bps: number(self.read_bps, before.read_bps),
            write_bps: number(self.write_bps, before.write_bps),
            burst_s: self.burst_s.or(before.burst_s),
        };
        after.for_node()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_leaves_what_it_does_not_name() {
        let limits = spile_node::Limits { iops: Some(5), write_bps: Some(7), ..Default::default() };
        let change = ChangeLimits { iops: Some(0), read_bps: Some(9), burst_s: Some(0.5), ..Default::default() };
        let burst = Some(Duration::from_millis(500));
        let wanted = spile_node::Limits { iops: None, read_bps: Some(9), burst, ..limits };
        assert_eq!(change.applied_to(limits).unwrap(), wanted);
        let off = ChangeLimits { off: true, iops: Some(3), ..Default::default() };
        assert_eq!(off.applied_to(wanted).unwrap(), spile_node::Limits { iops: Some(3), ..Default::default() });
        for burst_s in [-1.0, f64::NAN, 1e300, 4000.0, 0.001] {
            let change = ChangeLimits { burst_s: Some(burst_s), ..Default::default() };
            assert_eq!(change.applied_to(limits).unwrap_err().kind(), ErrorKind::InvalidInput);
        }
        let older = Limits { iops: Some(5), burst_s: Some(0.001), ..Limits::default() };
        let burst = Some(spile_node::Limits::LEAST_BURST);
        assert_eq!(older.kept().unwrap(), spile_node::Limits { iops: Some(5), burst, ..Default::default() });
    }
}
