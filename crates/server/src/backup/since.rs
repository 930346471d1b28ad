//! Checkpoints of backups: they are made in the moment of a backup, and the next one copies what has changed since.

use std::cell::RefCell;
use std::pin::Pin;
use std::sync::Arc;

use spile_core::{Error, ErrorKind, Extent, Result, yield_now};
use spile_image::Graph;
use spile_life::backup::{self, Around, Begun, Subject};
use spile_store::HostStore;

use super::{Backup, HostNode, Manifest, Options};
use crate::checkpoints::Checkpoints;

/// So many bytes of a disk are asked at once for what has changed.
const STEP_BYTES: u64 = 16 << 30;

pub(super) type HostBegun = Begun<HostStore, Graph<HostStore>>;
/// What is left to do while the checkpoints of some disks are made.
type Then<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// When the checkpoint `name` of the disk was made, in seconds since 1970 UTC.
pub(super) async fn made_at(backup: &Backup, name: &str) -> Result<u64> {
    let Some(checkpoints) = &backup.checkpoints else { return Err(offline()) };
    checkpoints.made_at(name).await
}

fn offline() -> Error {
    let what = "only disks in files have checkpoints";
    Error::new(ErrorKind::Unsupported, what).hint("leave --checkpoint and --since out")
}

/// Makes the point in time, with a checkpoint of each disk in the same moment if that is wanted: all of them, or none.
pub(super) async fn begin(
    backups: &[Backup],
    subjects: Vec<Subject<'_, HostStore, Graph<HostStore>>>,
    around: &Around,
    options: &Options,
) -> Result<Vec<HostBegun>> {
    let Some(name) = &options.checkpoint else { return backup::begin(subjects, around).await };
    let disks: Vec<_> = backups
        .iter()
        .map(|backup| Ok((backup.checkpoints.as_deref().ok_or_else(offline)?, &backup.node)))
        .collect::<Result<_>>()?;
    let (begun, made) = (RefCell::new(Vec::new()), RefCell::new(Vec::new()));
    let point = Box::pin(async {
        let new = backup::begin(subjects, around).await?;
        begun.borrow_mut().extend(new);
        Ok(())
    });
    let done = with_checkpoints(&disks, name, point, &made).await;
    let begun = begun.take();
    match done {
        Ok(()) => Ok(begun),
        Err(error) => {
            for (point, _) in &begun {
                point.end().await;
            }
            for (checkpoints, node) in made.take() {
                let _ = checkpoints.remove(node, name).await;
            }
            Err(error)
        }
    }
}

type Pair<'a> = (&'a Checkpoints, &'a Arc<HostNode>);

/// Makes the checkpoint `name` of each of these disks, and does `then` in the moment that all of them have in common.
fn with_checkpoints<'a>(
    disks: &'a [Pair<'a>],
    name: &'a str,
    then: Then<'a>,
    made: &'a RefCell<Vec<Pair<'a>>>,
) -> Then<'a> {
    Box::pin(async move {
        let Some(((checkpoints, node), others)) = disks.split_first() else { return then.await };
        let meanwhile = async move || with_checkpoints(others, name, then, made).await;
        checkpoints.make_with(node, name, None, meanwhile).await?;
        made.borrow_mut().push((checkpoints, node));
        Ok(())
    })
}

/// Which disk these are the checkpoints of, as manifests say it.
pub(super) async fn disk_id(checkpoints: &Checkpoints) -> Option<String> {
    checkpoints.disk_id().await.map(|id| format!("{:032x}", u128::from_be_bytes(id)))
}

/// The checkpoints that a backup has to do with.
#[derive(Clone)]
pub(super) struct Names {
    /// It was made in the moment of the backup.
    pub made: Option<String>,
    /// Only what has changed since this one is copied, which was made then, in seconds since 1970 UTC.
    pub since: Option<(String, u64)>,
}

impl Names {
    /// Asks what has changed since the checkpoint that is named (`None`: everything is to be copied), and notes it and the one that was made in
    /// `manifest`. Requests of before the backup's moment have ended: one that still waits to change a block may not have noted it yet.
    pub async fn look_back(
        &self,
        checkpoints: &Checkpoints,
        node: &HostNode,
        manifest: &mut Manifest,
    ) -> Result<Option<Vec<Extent>>> {
        if let Some(name) = &self.made {
            manifest.checkpoint_unix_s = Some(checkpoints.made_at(name).await?);
            manifest.checkpoint = Some(name.clone());
            manifest.disk_id = disk_id(checkpoints).await;
        }
        let Some((since, made_unix_s)) = &self.since else { return Ok(None) };
        manifest.since = Some(since.clone());
        let (size, mut at, mut changed) = (manifest.virtual_size_bytes, 0, Vec::<Extent>::new());
        while at < size {
            let end = size.min(at + STEP_BYTES);
            // More may count as changed by now than in the moment of the backup: it is copied as it was.
            for range in checkpoints.changed(node, since, None, at..end).await?.ranges {
                // Blocks may reach over the end of a step.
                let start = changed.last().map_or(range.start(), |last| range.start().max(last.end()));
                if start < range.end() {
                    changed.push(Extent::from_range(start..range.end()));
                }
            }
            at = end;
            yield_now().await;
        }
        if checkpoints.made_at(since).await? != *made_unix_s {
            let what = format!("the checkpoint {since:?} was made anew while the backup began");
            let hint = "what had changed before is not known any more: make a full backup with --checkpoint";
            return Err(Error::new(ErrorKind::Busy, what).hint(hint));
        }
        Ok(Some(changed))
    }
}
