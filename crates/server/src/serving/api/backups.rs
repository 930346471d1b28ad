//! Backups of disks that are served, as callers of the API begin them.

use std::path::Path;
use std::sync::Arc;

use spile_core::{Error, ErrorKind, Locator, Result};
use spile_life::jobs::Wishes;

use super::types::{self, DiskBackup, NewBackup};
use super::view::View;
use crate::backup::{self, Backup, Options, TargetSpec};
use crate::serving::jobs::{DiskJob, DiskJobs, What};

impl View {
    /// Begins backups at one point in time, and waits until that has come.
    ///
    /// # Errors
    /// As [`View::find`]; `InvalidInput` when no disk is named, or one twice; `Busy` when one has a job; why a backup is refused.
    pub async fn begin_backup(&self, server: &str, new: &NewBackup) -> Result<Vec<types::Job>> {
        let Some(first) = new.disks.first() else { return Err(invalid("no disk is named".to_owned())) };
        let mut begun: Vec<(Arc<DiskJobs>, Arc<DiskJob>)> = Vec::new();
        let mut backups = Vec::new();
        for one in &new.disks {
            if new.disks.iter().filter(|other| other.disk == one.disk).count() > 1 {
                return Err(invalid(format!("the disk {:?} is named twice", one.disk)));
            }
            self.refuse_own_export(Some(&one.target), "a backup would overwrite a disk in use").await?;
            let (node, jobs, path) = self.served(&one.disk)?;
            let checkpoints = Some(self.checkpoints_of(&one.disk)?);
            let wishes = Wishes { limit_bytes_per_s: new.limit_bytes_per_s, ..Wishes::default() };
            let job = DiskJob::new(What::Backup(one.target.clone()), wishes);
            let target = target(one)?;
            begun.push((jobs, job.clone()));
            backups.push(Backup { node, disk: Path::new(&path).into(), target, checkpoints, job });
        }
        let (_, jobs, _) = self.served(&first.disk)?;
        let options = Options {
            fleece_dir: new.fleece_dir.as_ref().map(Into::into),
            fleece_limit_bytes: new.fleece_limit_bytes,
            checkpoint: new.checkpoint.clone(),
            since: new.since.clone(),
            access: jobs.access(),
            is_offline: false,
        };
        for (number, (jobs, job)) in begun.iter().enumerate() {
            if let Err(busy) = jobs.add(job.clone()) {
                forget(&begun[..number]);
                return Err(busy);
            }
        }
        self.spawn(move || backup::run(backups, options));
        // At once: a caller that hangs up takes what comes after its wait along.
        for (jobs, job) in begun.clone() {
            self.spawn(move || async move {
                job.job().over().await;
                jobs.tell_end(&job);
            });
        }
        for (_, job) in &begun {
            if let Err(refused) = job.job().accepted().await {
                forget(&begun);
                return Err(refused);
            }
        }
        begun.iter().map(|(_, job)| self.job(server, job.id())).collect()
    }
}

/// Forgets jobs that were refused. None of them is at work.
fn forget(begun: &[(Arc<DiskJobs>, Arc<DiskJob>)]) {
    begun.iter().for_each(|(jobs, job)| jobs.forget(job.id()));
}

fn target(one: &DiskBackup) -> Result<TargetSpec> {
    let at: Locator = one.target.parse()?;
    match &at {
        Locator::Path(path) if !path.is_absolute() => Err(invalid(format!("{} is no whole path", one.target))),
        _ => {
            let format = one.format.as_deref().map(str::parse).transpose()?;
            let path = |text: &Option<String>| text.as_ref().map(Into::into);
            let (manifest, parent) = (path(&one.manifest), path(&one.parent));
            Ok(TargetSpec { at, format, manifest, parent, overwrite: one.overwrite })
        }
    }
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidInput, what)
}
