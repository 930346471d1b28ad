//! [`OwnJobs`]: the jobs that a command does itself, on disks that no server has. They are seen and steered as those of a server.
//!
//! The command answers on a socket in the folder of control sockets, with the paths of jobs alone
//! ([`api::jobs`](super::api::jobs)). The name of the socket ends in [`EXTENSION`] and not as that of a server: whoever looks for
//! the server of a disk passes it over. A command that was killed leaves a socket on which nobody answers; the next command removes it.

use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use spile_core::Result;
use spile_front::Connections;
use spile_store::own_folder;

use super::api::discovery::{self, JOBS_EXTENSION as EXTENSION};
use super::api::http::{self, Answering};
use super::api::jobs::{HasJobs, router};
use super::api::types::{Job, JobChange};
use super::fronts::{Listening, Role};
use super::jobs::{DiskJob, no_such_job};
use super::sockets::Endpoint;
use crate::listen::{SocketAccess, is_dead};
use crate::uri::Address;

/// Whoever has cancelled a job has so long to see how it has ended, before the command forgets it.
const LAST_LOOK: Duration = Duration::from_millis(500);
/// How often is looked whether it was seen.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The jobs of this command. When it is dropped, nobody hears of them any more.
pub struct OwnJobs {
    shown: Arc<Shown>,
    /// Removes the socket's name.
    _listening: Option<Listening>,
}

/// What callers see.
struct Shown {
    jobs: Mutex<Vec<Own>>,
    /// The socket's path.
    socket: String,
}

struct Own {
    job: Arc<DiskJob>,
    disk: String,
    path: String,
    /// A caller has cancelled it, and has not seen yet how it has ended.
    is_awaited: AtomicBool,
}

impl OwnJobs {
    /// The jobs of a command that does work of this kind (`coalesce`). There is none yet. The work goes on when they cannot be shown, which is a
    /// line in the log.
    pub fn open(kind: &str) -> Self {
        // No server has a socket that is found, either.
        let Ok(folder) = discovery::folder() else { return Self::unseen() };
        let shown = Self::listen(&folder, kind);
        shown.unwrap_or_else(|error| {
            tracing::warn!("`spile jobs` does not show this work: {error}");
            Self::unseen()
        })
    }

    /// The jobs of a command that nobody has to see.
    pub fn unseen() -> Self {
        Self { shown: Arc::new(Shown::new(String::new())), _listening: None }
    }

    fn listen(folder: &Path, kind: &str) -> Result<Self> {
        own_folder::make(folder)?;
        remove_dead(folder);
        let path = folder.join(format!("{kind}-{}.{EXTENSION}", std::process::id()));
        let shown = Arc::new(Shown::new(path.display().to_string()));
        let endpoint = Endpoint::new(Role::Control, None, &Address::Unix(path))?;
        let listening = Listening::publish(endpoint.bind(SocketAccess::default())?)?;
        let calls = Connections::new("the socket of this command", usize::MAX, 1);
        let answering = Answering { router: router(shown.clone()), calls, events: None };
        http::listen(listening.share()?, answering)?;
        Ok(Self { shown, _listening: Some(listening) })
    }

    /// Shows `job`, on the disk of this name and path.
    pub fn add(&self, job: &Arc<DiskJob>, disk: &str, path: &str) {
        let (disk, path, is_awaited) = (disk.to_owned(), path.to_owned(), AtomicBool::new(false));
        self.shown.jobs().push(Own { job: job.clone(), disk, path, is_awaited });
    }

    /// The disk at `path` is closed: its jobs that are over are shown no more. Whoever has cancelled one has seen before that it is, unless he does not look.
    pub fn leave(&self, path: &str) {
        let end = Instant::now() + LAST_LOOK;
        let is_over = |own: &Own| own.path == path && own.job.job().state().is_over();
        let is_awaited = |own: &Own| is_over(own) && own.is_awaited.load(Ordering::SeqCst);
        while self.shown.jobs().iter().any(is_awaited) && Instant::now() < end {
            std::thread::sleep(LOOK_EVERY);
        }
        self.shown.jobs().retain(|own| !is_over(own));
    }
}

impl Shown {
    fn new(socket: String) -> Self {
        Self { jobs: Mutex::default(), socket }
    }

    fn jobs(&self) -> MutexGuard<'_, Vec<Own>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, id: &str, act: impl FnOnce(&Own) -> Result<T>) -> Result<T> {
        let jobs = self.jobs();
        act(jobs.iter().find(|own| own.job.id() == id).ok_or_else(|| no_such_job(id))?)
    }
}

impl HasJobs for Shown {
    fn jobs(&self) -> Result<Vec<Job>> {
        Ok(Shown::jobs(self).iter().map(|own| own.job.show(&own.disk, &own.path, &self.socket)).collect())
    }

    fn job(&self, id: &str) -> Result<Job> {
        self.with(id, |own| {
            let job = own.job.show(&own.disk, &own.path, &self.socket);
            if !job.is_under_way() {
                own.is_awaited.store(false, Ordering::SeqCst);
            }
            Ok(job)
        })
    }

    fn change<'a>(
        &'a self,
        id: &'a str,
        change: &'a JobChange,
    ) -> Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>> {
        let changed = self.with(id, |own| {
            own.job.change(change)?;
            if change.state.as_deref() == Some("cancelled") {
                own.is_awaited.store(true, Ordering::SeqCst);
            }
            Ok(())
        });
        Box::pin(std::future::ready(changed))
    }
}

/// Removes what commands that were killed have left in the folder. A socket appears there only when it listens, so one that refuses is dead.
fn remove_dead(folder: &Path) {
    for socket in discovery::sockets_of_commands(folder).unwrap_or_default() {
        if is_dead(&socket) {
            let _ = std::fs::remove_file(&socket);
        }
    }
}
