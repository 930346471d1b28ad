//! Trouble that passes, for the disks of [`super`]: stores hang for a while, and in some lives the disks' policy is to wait.
//!
//! Then no client may see an error that may pass, whatever fails and however full the host's disk is: the request waits until it
//! succeeds. What was promised is promised all the same, over the death of the process in the midst of the wait.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use spile_core::Timer;
use spile_node::{OnError, Policy, Troubles};

use super::{Broken, Host};
use crate::faults::Faults;
use crate::plan::Life;
use crate::rng::Rng;
use crate::turns::{pause, turns};

/// A clock on which time goes by only in sleeps, and a sleep is a number of turns of the executor.
#[derive(Default)]
struct TurnTimer {
    slept_ns: AtomicU64,
}

impl Timer for TurnTimer {
    fn sleep(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        self.slept_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        Box::pin(turns(time.as_millis() as u64 / 50))
    }

    fn now_ns(&self) -> u64 {
        self.slept_ns.load(Ordering::Relaxed)
    }
}

/// The policy of a disk whose requests wait for as long as it takes, if they do.
pub(super) fn policy(broken: Broken) -> Troubles {
    let on_error = if broken == Broken::Impatient { OnError::Report } else { OnError::Pause };
    let policy = Policy { on_error, pause_at_most: None };
    Troubles::new(policy, Arc::new(TurnTimer::default()), Box::new(|_| {}))
}

/// True when all that fails in this life passes: no sync does.
pub(super) fn passes(life: &Life) -> bool {
    life.faults.sync_eio == 0
}

impl Host {
    /// Has files hang now and then, in half of the lives.
    pub(super) async fn hang(self: Rc<Self>, mut rng: Rng) {
        if rng.chance(1, 2) {
            return;
        }
        for _ in 0..rng.between(1, 4) {
            pause(&mut rng, 400).await;
            self.world.hang(rng.word(), rng.between(200, 3000));
        }
    }

    /// Gives the host space again after a while, when it was short.
    pub(super) async fn relieve(self: Rc<Self>, faults: Faults, mut rng: Rng) {
        if faults.space_bytes.is_some() {
            pause(&mut rng, 3000).await;
            self.world.set_faults(Faults { space_bytes: None, ..faults });
        }
    }
}
