//! [`Doors`]: by which ways guests and clients come to one disk, and whether they may use it while it moves with its guest from host to host.
//!
//! The guest goes on at the other host only after the disk was handed over, and not here any more. At every moment one side may write:
//! the mirror, by NBD, until the disk is handed over; from then on the guest, on one host.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use spile_core::{Error, ErrorKind, Result};
use spile_front::{Door, Passage};
use spile_front_nbd::Server as NbdServer;
use spile_life::jobs::State;

use super::disks::ServedDisk;
use super::jobs::DiskJob;
use super::passages::Passages;

/// How long a disk may take to be handed over. Its guest waits meanwhile.
pub const HAND_OVER_BOUND: Duration = Duration::from_secs(30);

/// The ways to one disk.
#[derive(Clone, Default)]
pub struct Doors {
    /// Those of guests.
    pub guests: Vec<Arc<dyn Door>>,
    /// NBD servers, each with an export that is the disk.
    pub clients: Vec<(Arc<NbdServer<ServedDisk>>, String)>,
    /// Set once no NBD client may choose the disk any more, on servers to come as well.
    pub withdrawn: Arc<AtomicBool>,
    /// A hand-over has done that: it is taken back when the disk stays here after all.
    pub withdrawn_to_go: Arc<AtomicBool>,
    /// What the next server is to know.
    pub passages: Arc<Passages>,
}

impl Doors {
    /// Whether guests may use the disk now.
    pub fn passage(&self) -> Passage {
        let shut = self.guests.iter().map(|guests| guests.passage()).find(|passage| *passage != Passage::Open);
        let none = if self.passages.is_gone() { Passage::Gone } else { Passage::Open };
        shut.unwrap_or(none)
    }

    /// True when a guest wants to use the disk, and has not shared its memory.
    pub fn lacks_memory(&self) -> bool {
        self.guests.iter().any(|guests| guests.lacks_memory())
    }

    fn has_clients(&self) -> bool {
        self.clients.iter().any(|(server, export)| server.metrics(export).connections > 0)
    }

    /// No guest uses the disk from now on.
    fn shut(&self) -> Result<()> {
        for (number, guests) in self.guests.iter().enumerate() {
            if let Err(error) = guests.shut() {
                let_all_in(&self.guests[..number]);
                return Err(error);
            }
        }
        // Before the look: one may come in between.
        self.withdrawn_to_go.store(!self.withdrawn.swap(true, Ordering::SeqCst), Ordering::SeqCst);
        if self.has_clients() {
            self.stay();
            let what = "an NBD client is connected to the disk here, and may write to it";
            return Err(Error::new(ErrorKind::Busy, what).hint("have it hang up first"));
        }
        self.passages.note_gone().inspect_err(|_| self.stay())
    }

    /// The disk is not handed over: guests and clients go on.
    fn stay(&self) {
        self.passages.note_here();
        self.show_again();
        let_all_in(&self.guests);
    }

    /// The disk is an export again, if a hand-over has withdrawn it.
    fn show_again(&self) {
        if self.withdrawn_to_go.swap(false, Ordering::SeqCst) {
            self.withdrawn.store(false, Ordering::SeqCst);
        }
    }

    /// What a guest that is let in may rely on is noted before that.
    fn note_here(&self) {
        if self.passage() != Passage::Open {
            self.passages.note_here();
        }
    }

    fn refuse_half(&self) -> Result<()> {
        if self.clients.is_empty() || self.clients.iter().any(|(server, export)| server.is_left_whole(export)) {
            return Ok(());
        }
        let what = "the copy may be half: nobody has said here that it is whole";
        let hint = "there: `spile job ID hand-over`; when that has succeeded, and this server was started again since or another program has copied the disk, say --as-it-is here";
        Err(Error::new(ErrorKind::Denied, what).hint(hint))
    }

    /// Guests may use the disk from now on. Where it has come from another host, it is no NBD export any more: nothing but its guest writes to
    /// it. `as_it_is`: its copy is taken for whole although nobody has said so. Not to be called on a worker.
    ///
    /// # Errors
    /// `Busy` while the other host still writes to it; `Denied` when the copy may be half; what keeps a guest out.
    pub fn let_in(&self, as_it_is: bool) -> Result<()> {
        match self.passage() {
            Passage::Coming => {
                // Before the look: one may come in between.
                self.withdrawn.store(true, Ordering::SeqCst);
                // The other host may have to go on with its copy.
                let refused = self.refuse_clients().and_then(|()| if as_it_is { Ok(()) } else { self.refuse_half() });
                refused.inspect_err(|_| self.withdrawn.store(false, Ordering::SeqCst))?;
            }
            Passage::Gone | Passage::Open => {}
        }
        let is_back = self.passage() != Passage::Coming;
        self.note_here();
        if is_back {
            self.show_again();
        }
        // Also where the disk is open: a guest may wait for what an older build has told it.
        self.guests.iter().try_for_each(|guests| guests.let_in())
    }

    fn refuse_clients(&self) -> Result<()> {
        if !self.has_clients() {
            return Ok(());
        }
        let what = "the other host still writes to the disk: it has not handed it over";
        Err(Error::new(ErrorKind::Busy, what).hint(
            "there: `spile job ID hand-over`, and go on only when it succeeds; after that it may be a connection of a host that is dead, which is noticed within 2 minutes",
        ))
    }

    /// Has the copy that `job` keeps in step come to its end, while no guest uses the disk, nor does one any more after it.
    ///
    /// # Errors
    /// `Busy` when the copy is not in step, or something uses the disk; that of the job. Guests may go on here then. `TimedOut` when it takes too
    /// long: then nobody knows yet whether the other host has the disk, and guests wait here until they are let in.
    pub async fn hand_over(self, disk_job: Arc<DiskJob>) -> Result<()> {
        self.shut_in_time().await?;
        let job = disk_job.job();
        job.finish();
        let over = tokio::time::timeout(HAND_OVER_BOUND, job.over()).await;
        if over.is_err() {
            job.take_finish_back();
        }
        // It may have ended just now.
        let report = job.report();
        if report.state == State::Done {
            return Ok(());
        }
        if over.is_err() && !report.state.is_over() {
            let what =
                format!("after {} s it is not known whether the other host has the disk", HAND_OVER_BOUND.as_secs());
            let hint = "guests wait here. Cancel the job: when it is `done`, the other host has the disk; when it is `cancelled`, `spile resume` here lets guests go on; else look at the other host";
            return Err(Error::new(ErrorKind::TimedOut, what).hint(hint));
        }
        // The other host was told to give the copy its name, and has not answered.
        let is_unknown = report.state == State::Stopped
            || report.error.as_ref().is_some_and(|error| error.kind() == ErrorKind::TimedOut);
        if is_unknown && disk_job.is_to_be_named() {
            let what =
                format!("the job is {}, and it is not known whether the other host has the disk", report.state.name());
            let hint = "guests wait here. A job that was stopped goes on with the next server: cancel it there, and `spile resume` lets guests go on when it is `cancelled`; else look at the other host first";
            return Err(Error::new(ErrorKind::TimedOut, what).hint(hint));
        }
        blocking(move || {
            self.stay();
            Ok(())
        })
        .await?;
        let hint = "the disk stays here, and guests may go on here: cancel the guest's migration";
        Err(match report.error {
            Some(error) => error.hint(hint),
            None => Error::new(ErrorKind::Busy, format!("the copy is {}", report.state.name())).hint(hint),
        })
    }

    /// Shuts the doors. A guest's connection that hangs does not keep the caller for ever: when it has come to its end, the doors open again.
    async fn shut_in_time(&self) -> Result<()> {
        let doors = self.clone();
        let mut shutting = tokio::spawn(blocking(move || doors.shut()));
        if let Ok(shut) = tokio::time::timeout(HAND_OVER_BOUND, &mut shutting).await {
            return shut.unwrap_or_else(|_| Err(Error::new(ErrorKind::Shutdown, "the server ends")));
        }
        let doors = self.clone();
        tokio::spawn(async move {
            if let Ok(Ok(())) = shutting.await {
                let _ = blocking(move || {
                    doors.stay();
                    Ok(())
                })
                .await;
            }
        });
        let what = format!("a guest's connection did not answer for {} s", HAND_OVER_BOUND.as_secs());
        Err(Error::new(ErrorKind::TimedOut, what).hint("a request of it may hang (`spile slow`); the disk stays here"))
    }
}

/// The disk stays here.
fn let_all_in(guests: &[Arc<dyn Door>]) {
    for guests in guests {
        if let Err(error) = guests.let_in() {
            tracing::error!("a guest whose disk stays here cannot go on yet; `spile resume` tries it again: {error}");
        }
    }
}

/// Does what may wait for a guest's connection.
pub async fn blocking(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| Err(Error::new(ErrorKind::Shutdown, "the server ends")))
}
