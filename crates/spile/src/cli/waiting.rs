//! A command that has a server do jobs waits here for their end, shows how far they are, and has Ctrl-C stop them.
//!
//! The work is the server's. So a command that is killed, or whose terminal is gone (SIGHUP), leaves the jobs at work.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use spile_core::{Error, ErrorKind, Result};
use spile_server::serving::api::client::{LOOK_PATIENCE, ask, call};
use spile_server::serving::api::types::{Failure, Job};

use super::progress::Progress;
use super::progress_bar;
use crate::log::complain;
use crate::signals::{EndSignals, exit_code};

/// Whether a command waits for the end of its job.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct WaitArgs {
    /// Return as soon as the disk's server has begun the job; `spile jobs` shows how far it is. Without this the command waits for the end.
    /// A disk that no server has is always waited for
    #[arg(long, conflicts_with = "wait")]
    background: bool,
    /// Wait for the end, as without this: a copy that stays in step (spile move --mirror-only) is waited for only with it
    #[arg(long)]
    wait: bool,
}

impl WaitArgs {
    /// True when the command waits for the end of a job. One that never ends by itself is waited for only when that is asked for.
    pub fn waits(self, is_endless: bool) -> bool {
        if is_endless { self.wait } else { !self.background }
    }

    /// Refuses to leave the work on a disk that no server has to anybody else.
    ///
    /// # Errors
    /// `InvalidInput`.
    pub fn refuse_background(self) -> Result<()> {
        if !self.background {
            return Ok(());
        }
        let what = "--background leaves the work to the disk's server, and no server has this disk: this command does the work itself";
        Err(Error::new(ErrorKind::InvalidInput, what)
            .hint("leave --background out; a shell runs a command in the background with & at its end"))
    }
}

/// How often is looked how far a job is.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long is waited for jobs to end that were asked to stop.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// What has become of jobs.
pub(super) enum Ended {
    /// All of them are done.
    Done(Vec<Job>),
    /// This signal has stopped some of them.
    Stopped(Signal),
}

/// The jobs that this command has had begun, as whoever hears a signal sees them.
#[derive(Default)]
struct Shared {
    /// The server and its jobs, once it has begun them.
    begun: Mutex<Option<(PathBuf, Vec<String>)>>,
    /// The signal that has asked them to stop, and when.
    told: OnceLock<(Signal, Instant)>,
}

/// A command that waits.
pub(super) struct Waiting(Arc<Shared>);

/// How a job is told of.
pub(super) struct Words {
    /// What it is doing: `moving`.
    pub doing: &'static str,
    /// What to do when the server does not answer any more.
    pub again: &'static str,
    /// What is left of a job that was stopped.
    pub left: fn(&Job) -> String,
}

impl Waiting {
    /// From now on Ctrl-C and SIGTERM stop the jobs that are begun. To be called before any other thread is started.
    ///
    /// # Errors
    /// The system's.
    pub fn begin() -> Result<Self> {
        let shared = Arc::<Shared>::default();
        let told = shared.clone();
        EndSignals::block()?.on_first_whole(move |signal| told.hear(signal));
        Ok(Self(shared))
    }

    /// Waits until all `jobs` of the server at `socket` are over.
    ///
    /// # Errors
    /// That of the first job that has failed, when all are over; the server's when it does not answer.
    pub fn until_over(self, socket: &Path, jobs: Vec<Job>, words: &Words) -> Result<Ended> {
        self.0.have_begun(socket, jobs.iter().map(|job| job.id.clone()).collect());
        let (mut done, mut failed, mut stopped) = (Vec::new(), None, None);
        for job in jobs {
            let job = self.0.wait_for(socket, job, words)?;
            match (failure(&job), self.0.told.get()) {
                (None, _) => done.push(job),
                (Some(_), Some((signal, _))) if job.error.is_none() => {
                    complain(format_args!("{}: the {} {}", job.disk, job.kind, (words.left)(&job)));
                    stopped = Some(*signal);
                }
                (Some(error), _) => failed = failed.or(Some(error)),
            }
        }
        match (failed, stopped) {
            (Some(error), _) => Err(error),
            (None, Some(signal)) => Ok(Ended::Stopped(signal)),
            (None, None) => Ok(Ended::Done(done)),
        }
    }
}

impl Shared {
    /// The server at `socket` has begun these jobs. A signal that came before was for them.
    fn have_begun(&self, socket: &Path, jobs: Vec<String>) {
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        if self.told.get().is_some() {
            stop(socket, &jobs);
        }
        *begun = Some((socket.to_owned(), jobs));
    }

    /// Has the jobs stop: at once, or as soon as they have begun.
    fn hear(&self, signal: Signal) {
        let begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        let (server, jobs) = begun.clone().unwrap_or_default();
        if signal != Signal::SIGHUP {
            let _ = self.told.set((signal, Instant::now()));
            return stop(&server, &jobs);
        }
        match &jobs[..] {
            [] => complain("whether the job has begun is not known: `spile jobs` shows it"),
            jobs => jobs.iter().for_each(|id| {
                complain(format_args!("the job {id} goes on: `spile jobs` shows it, `spile job {id} cancel` ends it"));
            }),
        }
        std::process::exit(exit_code(signal));
    }

    /// Shows how far a job of a server is until it is over, or was told to end and does not for some time.
    fn wait_for(&self, socket: &Path, mut job: Job, words: &Words) -> Result<Job> {
        let bar = progress_bar(job.total_bytes, words.doing);
        // Many jobs are short.
        let mut wait = LOOK_EVERY / 20;
        while job.is_under_way() {
            show(&bar, &job);
            if self.told.get().is_some_and(|(_, at)| at.elapsed() > STOP_PATIENCE) {
                bar.finish_and_clear();
                let what = format!("the job {} is told to stop, and stops when its storage answers", job.id);
                return Err(Error::new(ErrorKind::TimedOut, what).hint("`spile jobs` shows it"));
            }
            std::thread::sleep(wait);
            wait = LOOK_EVERY.min(wait * 2);
            job = ask(socket, "GET", &format!("/v1/jobs/{}", job.id), LOOK_PATIENCE)
                .map_err(|error| error.hint(words.again))?;
        }
        bar.finish_and_clear();
        Ok(job)
    }
}

/// Tells jobs of the server at `socket` to stop.
fn stop(socket: &Path, jobs: &[String]) {
    for id in jobs {
        let body = json!({ "state": "cancelled" });
        let told: Result<Value> = call(socket, "PATCH", &format!("/v1/jobs/{id}"), Some(&body), LOOK_PATIENCE);
        match told {
            // One that is over needs not be told.
            Err(error) if error.kind() != ErrorKind::InvalidInput => {
                complain(format_args!("the job {id} could not be told to stop: {error}"));
            }
            _ => {}
        }
    }
}

fn show(bar: &Progress, job: &Job) {
    bar.set_length(job.total_bytes);
    bar.set_position(job.done_bytes);
}

/// Why a job that is over is not done; `None` when it is.
fn failure(job: &Job) -> Option<Error> {
    Some(match (&job.error, job.state.as_str()) {
        (None, "done") => return None,
        (Some(error), _) => Failure { error: error.clone() }.into_error(),
        (None, "stopped") => {
            let what = "the job was stopped: its disk was detached, or its server has ended";
            Error::new(ErrorKind::Shutdown, what).hint(match job.kind.as_str() {
                "backup" => "begin the backup anew when the disk is served again",
                _ => "what it has done stays done, and the next server of the disk goes on with it",
            })
        }
        (None, state) => was_cancelled(&job.kind, state),
    })
}

/// The error that a job did not come to its end, because its users did not want it.
pub(super) fn was_cancelled(kind: &str, state: &str) -> Error {
    let left = if kind == "backup" { "begin it anew" } else { "what it has done stays done" };
    Error::new(ErrorKind::Shutdown, format!("the job was {state}; {left}"))
}
