//! Jobs on the images of a disk of this host: what `spile-life` needs besides the disk. A server and the commands for disks that nobody
//! serves run them in the same way.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use spile_core::{Disk as _, Env, Error, ErrorKind, Result};
use spile_engine::OsEnv;
use spile_image::{Broken, Graph, LayerInfo};
use spile_life::jobs::{Job, Note, Plan, which};
use spile_life::{Later, Neighbours, NoteChild, Sizes, Work};
use spile_node::Node;
use spile_store::{CacheMode, HostFiles, HostStore, OsFiles};

use crate::checkpoints::Checkpoints;
use crate::family;
use crate::far_children::HostNotes;
use crate::noted::Noted;
use crate::serving::failed_syncs;

/// How the files of a disk are opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Access {
    /// How their bytes are reached.
    pub cache: CacheMode,
    /// They are not locked.
    pub no_lock: bool,
}

/// Does what `plan` says of the disk `node`, which has these checkpoints, and says in `job` how it ended. It is to run on a worker.
///
/// # Errors
/// As [`spile_life::run`]; `Denied` after a failed sync of one of its images.
pub async fn run(
    node: &Node<Graph<HostStore>>,
    checkpoints: &Checkpoints,
    access: Access,
    job: &Job,
    plan: &Plan,
) -> Result<()> {
    let graph = node.graph().await;
    if let Err(error) = refuse_failed_syncs(&graph) {
        let failed = Err(error);
        job.end(&failed);
        return failed;
    }
    let neighbours = Beside(graph.layers());
    drop(graph);
    let files = HostFiles::new(OsFiles::new(access.cache).without_locks(access.no_lock));
    let asking = HostFiles::new(OsFiles::new(CacheMode::Page).without_locks(true));
    let env: Arc<dyn Env> = Arc::new(OsEnv);
    let noted = Noted::new(node, checkpoints);
    let work = Work {
        files: &files,
        asking: &asking,
        env: &env,
        timer: &OsEnv,
        node,
        job,
        neighbours: &neighbours,
        marks: Some(&noted),
        sizes: Sizes::default(),
        broken: Broken::Nothing,
    };
    // A long future: whoever waits for it need not hold all of it on a worker's stack.
    Box::pin(spile_life::run(&work, plan)).await
}

/// Forgets what is noted of the changes of `disk`, which has no job, under names that no user sees, where nobody needs it any more.
pub async fn forget_what_is_over(disk: &Node<Graph<HostStore>>, checkpoints: &Checkpoints) {
    if disk.info().read_only || checkpoints.hidden().await.is_empty() {
        return;
    }
    let path = disk.graph().await.handles()[0].path().to_owned();
    let files = HostFiles::new(OsFiles::new(CacheMode::Page).without_locks(true));
    let noted = Noted::new(disk, checkpoints);
    if let Err(error) = spile_life::motion::forget_what_is_over(&files, &path, &noted).await {
        tracing::warn!("{}: changes are noted that nobody needs any more: {error}", path.display());
    }
}

/// The files in the folders of these images.
struct Beside(Vec<LayerInfo>);

impl Neighbours for Beside {
    fn list(&self) -> Pin<Box<dyn Future<Output = Result<Vec<PathBuf>>> + '_>> {
        Box::pin(family::beside(&self.0))
    }

    fn beside<'a>(&'a self, image: &'a Path) -> Pin<Box<dyn Future<Output = Result<Vec<PathBuf>>> + 'a>> {
        Box::pin(async move { family::files_in(image.parent().unwrap_or(Path::new("/"))).await })
    }
}

impl NoteChild for Beside {
    fn note_child<'a>(&'a self, parent: &'a Path, child: &'a Path) -> Later<'a, ()> {
        HostNotes.note_child(parent, child)
    }
}

/// Refuses to move what may be lost: in another image nobody would be told of the loss.
pub(crate) fn refuse_failed_syncs(graph: &Graph<HostStore>) -> Result<()> {
    let failed = failed_syncs::marked(graph).into_iter().next().or_else(|| failed_syncs::find(graph));
    let Some(failed) = failed else { return Ok(()) };
    let hint = format!("`spile accept-loss {}`, once a backup is restored or the loss does not matter", failed.path);
    Err(Error::new(ErrorKind::Denied, failed.to_string()).hint(hint))
}

/// What a process before has begun to do with the disk of `graph`, if it did not come to its end. What is left of a job on another disk, which had the same
/// path, goes.
///
/// # Errors
/// As [`Note::read`].
pub async fn left(graph: &Graph<HostStore>) -> Result<Option<Note>> {
    let path = graph.handles()[0].path();
    if !path.is_absolute() || path.starts_with("/dev") {
        return Ok(None);
    }
    let files = HostFiles::new(OsFiles::new(CacheMode::Page).without_locks(true));
    match Note::read(&files, path).await? {
        Some(note) if !note.is_of(which(graph)) => {
            tracing::warn!(
                "{}: a {} was begun with another disk that lay there, and is not gone on with",
                path.display(),
                note.plan.kind()
            );
            Plan::remove(&files, path).await.map(|()| None)
        }
        note => Ok(note),
    }
}
