//! All servers of this host at once, for callers that look at them again and again: a server that hangs holds up no other.

use std::path::PathBuf;
use std::time::Duration;

use spile_core::Result;
use tokio::task::JoinSet;

use super::client::{runtime, typed, within};
use super::stats::{AllStats, DiskStats};
use super::types::{Disk, DiskList};

/// What a server says of its disks.
#[derive(Clone, Debug)]
pub struct Look {
    /// Its disks, and what they are doing.
    pub disks: Vec<Disk>,
    /// What was counted of each disk.
    pub stats: Vec<DiskStats>,
}

/// Asks the servers at all these control sockets at once. Calls `tell` with each answer when it comes, or with the reason why there is none:
/// `NotFound` when nobody listens on that socket any more. Every server has been told of when this returns, which is within `patience`.
///
/// # Errors
/// The system's, when nothing can be asked at all.
pub fn look_at(sockets: &[PathBuf], patience: Duration, mut tell: impl FnMut(PathBuf, Result<Look>)) -> Result<()> {
    runtime()?.block_on(async {
        let mut looks: JoinSet<_> = sockets.iter().cloned().map(|socket| look(socket, patience)).collect();
        while let Some(ended) = looks.join_next().await {
            match ended {
                Ok((socket, look)) => tell(socket, look),
                // Nobody cancels a look, so it has panicked, and the panic goes on here.
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            }
        }
        Ok(())
    })
}

async fn look(socket: PathBuf, patience: Duration) -> (PathBuf, Result<Look>) {
    let found = async {
        let disks: DiskList = typed(within(&socket, "GET", "/v1/disks", None, patience / 2).await?)?;
        let stats: AllStats = typed(within(&socket, "GET", "/v1/stats", None, patience / 2).await?)?;
        Ok(Look { disks: disks.disks, stats: stats.disks })
    };
    let found = found.await;
    (socket, found)
}
