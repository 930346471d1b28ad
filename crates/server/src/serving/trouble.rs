//! Trouble below a disk, as operators hear of it: one line in the log when requests begin to wait and one when none waits any
//! more, and the status that the service manager shows.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use spile_engine::OsEnv;
use spile_node::{News, Policy, Troubles};

use super::disks::Open;
use super::events::{self, GoesOn, Waits, What};
use crate::notify::notify;

/// The policy for trouble below the disk of this name.
pub fn of_disk(name: String, policy: Policy) -> Troubles {
    Troubles::new(policy, Arc::new(OsEnv), Box::new(move |news| tell(&name, news)))
}

/// The policy of an export that was set by an order, as one server tells it the next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptPolicy {
    export: String,
    on_error: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pause_at_most_us: Option<u64>,
}

impl KeptPolicy {
    /// The policy of each export of `disks`, if it is another one than the server was started with.
    pub fn of(disks: &[Open]) -> Vec<Self> {
        let of = |open: &Open| {
            let policy = Some(open.disk.troubles()?.policy()).filter(|policy| *policy != open.first_policy)?;
            let pause_at_most_us = policy.pause_at_most.map(|time| time.as_micros() as u64);
            let kept = move |export| Self { export, on_error: policy.on_error.to_string(), pause_at_most_us };
            Some(open.names.clone().into_iter().map(kept))
        };
        disks.iter().filter_map(of).flatten().collect()
    }

    /// Gives each disk its policy of `policies`, if there is one that this build knows.
    pub fn restore(policies: &[Self], disks: &[Open]) {
        for open in disks {
            let kept = policies.iter().find(|kept| open.names.contains(&kept.export));
            if let (Some(troubles), Some(kept)) = (open.disk.troubles(), kept)
                && let Ok(on_error) = kept.on_error.parse()
            {
                let pause_at_most = kept.pause_at_most_us.map(Duration::from_micros);
                troubles.set_policy(Policy { on_error, pause_at_most });
            }
        }
    }
}

pub(crate) fn tell(disk: &str, news: &News) {
    match news {
        News::Begins(waiting) => {
            let (op, error) = (waiting.op.name(), &waiting.error);
            tracing::error!(
                journal.disk = disk,
                journal.operation = op,
                journal.error = error as &(dyn std::error::Error + 'static),
                "the disk {disk:?} waits: a {op} has failed, and is tried again: {error} (`spile resume \
                 {disk}` tries at once, `spile on-error {disk} report` gives the error to the guest)"
            );
            notify(&format!("STATUS=the disk {disk:?} waits: {error}"));
            let waits = Waits { operation: op.to_owned(), message: error.to_string() };
            events::tell(Some(disk), What::Waits(waits));
        }
        News::Ends { time, requests, left, .. } if *left > 0 => {
            let time_s = time.as_secs_f64();
            tracing::warn!(
                journal.disk = disk,
                "the disk {disk:?} still waits, since {time_s:.1} s: {left} of {requests} request(s) are left to the next server"
            );
        }
        News::Ends { time, requests, reported, .. } => {
            let time_s = time.as_secs_f64();
            let failed = if *reported > 0 { format!("; {reported} were reported as failed") } else { String::new() };
            tracing::warn!(
                journal.disk = disk,
                "the disk {disk:?} goes on: {requests} request(s) have waited, {time_s:.1} s in all{failed}"
            );
            notify(&format!("STATUS=the disk {disk:?} goes on"));
            let goes_on = GoesOn { time_s, requests: *requests, reported: *reported };
            events::tell(Some(disk), What::GoesOn(goes_on));
        }
    }
}
