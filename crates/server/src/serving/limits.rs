//! The limits of a server's disks and of their groups: as they are given, changed, and kept over a takeover.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use spile_core::{Disk, Error, ErrorKind, Result};
use spile_engine::{Engine, OsEnv};
use spile_node::{DiskLimits, Group, Limits, Node};

use super::api::limits::{ChangeLimits, GroupLimits, Limits as Told};
use super::disks::{Open, ServedDisk};
use crate::limits::GroupSpec;

/// The most groups of a server.
const MOST_GROUPS: usize = 1000;

/// The groups of a server, by name.
#[derive(Default)]
pub struct Groups(Mutex<BTreeMap<String, Known>>);

struct Known {
    group: Arc<Group>,
    /// True when this server was told its limits; else those of a server before it hold.
    is_declared: bool,
}

impl fmt::Debug for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.lock().keys()).finish()
    }
}

impl Groups {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The group of this name; it is made if there is none.
    ///
    /// # Errors
    /// `Exhausted` when there are too many.
    fn get(&self, name: &str) -> Result<Arc<Group>> {
        let mut all = self.lock();
        // A group that limits nobody is nothing that anybody would miss, unless a disk has it, or somebody who has just asked for it.
        let is_in_use = |known: &Known| Arc::strong_count(&known.group) > 1;
        all.retain(|_, known| known.is_declared || is_in_use(known) || !known.group.limits().is_none());
        if all.len() >= MOST_GROUPS && !all.contains_key(name) {
            return Err(Error::new(ErrorKind::Exhausted, format!("there are {MOST_GROUPS} groups already")));
        }
        let new = || Known { group: Group::new(name, Arc::new(OsEnv)), is_declared: false };
        Ok(all.entry(name.to_owned()).or_insert_with(new).group.clone())
    }

    /// Makes the group of `spec`, with its limits.
    ///
    /// # Errors
    /// As [`Limits::check`].
    pub fn declare(&self, spec: &GroupSpec) -> Result<()> {
        self.get(&spec.name)?.set_limits(spec.limits)?;
        self.lock().get_mut(&spec.name).into_iter().for_each(|known| known.is_declared = true);
        Ok(())
    }

    /// All groups.
    pub fn list(&self) -> Vec<GroupLimits> {
        self.lock().values().map(|known| GroupLimits::from(&*known.group)).collect()
    }

    /// Changes the limits of the group of this name, which is made if there is none. Its disks have to be told
    /// ([`ServedDisk::place_limits`]).
    ///
    /// # Errors
    /// `InvalidInput` when the limits cannot be kept.
    pub fn change(&self, name: &str, change: &ChangeLimits) -> Result<()> {
        if change.group.is_some() || name.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "a group is in no group, and has a name"));
        }
        let group = self.get(name)?;
        let _other_changes_wait = self.lock();
        let limits = change.applied_to(group.limits())?;
        group.set_limits(limits)
    }

    /// Changes the limits of a disk.
    ///
    /// # Errors
    /// `InvalidInput` when they cannot be kept; `Shutdown` when the disk is closed.
    pub async fn change_disk(&self, disk: &ServedDisk, change: &ChangeLimits) -> Result<()> {
        let applied = || change.applied_to(disk.limits().map(|limits| limits.own()).unwrap_or_default());
        // What cannot be kept is refused before the disk changes its group.
        applied()?;
        match change.group.as_deref() {
            None => {}
            Some("") => disk.join_group(None).await?,
            Some(name) => disk.join_group(Some(self.get(name)?)).await?,
        }
        // Another change may have come while this one waited. From here to the change nothing is waited for.
        disk.set_limits(applied()?).await
    }
}

/// What limits a disk from its opening on.
pub fn of_disk() -> Arc<DiskLimits> {
    DiskLimits::new(Arc::new(OsEnv))
}

/// The limits of disks and groups that a server has, for the one that takes over from it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Kept {
    disks: Vec<KeptDisk>,
    groups: Vec<(String, Told)>,
}

/// A disk's own limits and its group.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct KeptDisk {
    export: String,
    own: Told,
    group: String,
}

impl Kept {
    /// What holds now.
    pub fn of(disks: &[Open], groups: &Groups) -> Self {
        let of_disk = |open: &Open| {
            let limits = open.disk.limits();
            let own = limits.map(|limits| Told::from(limits.own())).unwrap_or_default();
            let group = limits.and_then(|limits| limits.group()).map(|group| group.name().to_owned());
            let disk = move |export| KeptDisk { export, own: own.clone(), group: group.clone().unwrap_or_default() };
            open.names.clone().into_iter().map(disk)
        };
        let groups = groups.list().into_iter().map(|group| (group.name, group.limits)).collect();
        Self { disks: disks.iter().flat_map(of_disk).collect(), groups }
    }

    /// True when nothing is limited, so that there is nothing to tell.
    pub fn is_empty(&self) -> bool {
        let is_free = |disk: &KeptDisk| disk.own == Told::default() && disk.group.is_empty();
        self.groups.is_empty() && self.disks.iter().all(is_free)
    }

    /// Gives the groups that nobody declared here and the disks that `is_meant` names what they had. Limits that this build cannot keep
    /// are left out.
    ///
    /// # Errors
    /// `Shutdown` when a disk is closed.
    pub fn restore(
        &self,
        engine: &Engine,
        disks: &[Open],
        groups: &Arc<Groups>,
        is_meant: impl Fn(&Open) -> bool,
    ) -> Result<()> {
        for (name, limits) in &self.groups {
            let is_declared = groups.lock().get(name).is_some_and(|known| known.is_declared);
            if let (false, Ok(limits)) = (is_declared, limits.kept()) {
                groups.get(name)?.set_limits(limits)?;
            }
        }
        for open in disks {
            let kept = self.disks.iter().find(|kept| open.names.contains(&kept.export));
            if let Some(kept) = kept.filter(|_| is_meant(open)) {
                let group = Some(kept.group.as_str()).filter(|group| !group.is_empty());
                set(engine, open, groups, kept.own.kept().unwrap_or_default(), group)?;
            } else {
                place(engine, open)?;
            }
        }
        Ok(())
    }
}

/// Gives a disk its own limits and its group.
///
/// # Errors
/// `InvalidInput` when the limits cannot be kept; `Shutdown` when the disk is closed.
pub fn set(engine: &Engine, open: &Open, groups: &Groups, limits: Limits, group: Option<&str>) -> Result<()> {
    let (disk, group) = (open.disk.clone(), group.map(|name| groups.get(name)).transpose()?);
    engine.run_on(0, move || async move {
        disk.join_group(group).await?;
        disk.set_limits(limits).await
    })
}

/// Has the requests of all `disks` meet the limits that their groups have now. A disk that was closed meanwhile needs none.
///
/// # Errors
/// The first one of a disk; all others have been told.
pub async fn place_all<G: Disk>(disks: &[Arc<Node<G>>]) -> Result<()> {
    let mut all = Ok(());
    for disk in disks {
        match disk.place_limits().await {
            Err(error) if error.kind() == ErrorKind::Shutdown => {}
            placed => all = all.and(placed),
        }
    }
    all
}

/// As [`place_all`], of a disk that callers see from now on: its group may have got limits before they did. Nobody waits for that.
pub fn place_new(engine: &Engine, open: &Open) {
    let disk = open.disk.clone();
    engine.spawn_on(0, move || async move {
        if let Err(error) = place_all(&[disk]).await {
            tracing::error!("a new disk does not meet the limits of its group: {error}");
        }
    });
}

/// Has a disk's requests meet the limits that its group has now.
fn place(engine: &Engine, open: &Open) -> Result<()> {
    let disk = open.disk.clone();
    engine.run_on(0, move || async move { disk.place_limits().await })
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use spile_core::{DiskInfo, Epoch, Extent, ExtentStatus, Io};

    use super::*;

    fn some_limits() -> Limits {
        Limits { iops: Some(100), ..Limits::default() }
    }

    #[test]
    fn a_group_that_somebody_has_just_asked_for_stays_the_one_of_its_name() {
        let groups = Groups::default();
        let gold = groups.get("gold").unwrap();
        // Somebody else asks for a group before it has its limits.
        groups.get("silver").unwrap();
        gold.set_limits(some_limits()).unwrap();
        drop(gold);
        let listed: Vec<_> = groups.list().into_iter().map(|group| group.name).collect();
        assert_eq!(listed, ["gold", "silver"]);
        // Silver limits nobody and nobody has it any more.
        assert_eq!(groups.get("gold").unwrap().limits(), some_limits());
        assert_eq!(groups.list().len(), 1);
    }

    /// A graph that does nothing.
    struct Nothing;

    impl Disk for Nothing {
        fn info(&self) -> DiskInfo {
            DiskInfo {
                size_bytes: 1 << 20,
                request_align_bytes: 1,
                memory_align_bytes: 1,
                preferred_bytes: 4096,
                discard_align_bytes: 4096,
                read_only: false,
                fast_zero: true,
            }
        }

        async fn execute(&self, _: Io<'_>) -> Result<()> {
            Ok(())
        }

        async fn extents(&self, _: Extent, _: usize) -> Result<Vec<ExtentStatus>> {
            Ok(Vec::new())
        }

        async fn resize(&self, _: u64) -> Result<()> {
            Ok(())
        }

        fn follows(&self, _: &[Arc<dyn Epoch>]) {}

        async fn close(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_disk_that_is_closed_meanwhile_does_not_free_the_others_from_their_group() {
        let group = Group::new("gold", Arc::new(OsEnv));
        let disks = [0; 2].map(|_| Arc::new(Node::new(Nothing).with_limits(of_disk())));
        let work = async {
            for disk in &disks {
                disk.join_group(Some(group.clone())).await.unwrap();
            }
            group.set_limits(some_limits()).unwrap();
            disks[0].close().await.unwrap();
            place_all(&disks).await.unwrap();
            // The second disk meets the limits now, so there is a stage to take away.
            disks[1].detach(spile_node::Place::Limit).await.unwrap();
        };
        work.now_or_never().expect("nothing is under way that would have to be waited for");
    }
}
