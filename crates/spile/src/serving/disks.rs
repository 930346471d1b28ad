//! The images that are served, open for as long as they are.

use std::sync::Arc;
use std::time::Duration;

use spile_core::{Disk, ErrorKind, Result};
use spile_engine::{AnyStore, CacheMode, Engine};
use spile_image::{Aligned, Chain, Format, OpenOptions};

use crate::cli::complain;
use crate::disks::{self, DiskSpec};

/// How often and how long apart a busy disk is tried.
const BUSY_ATTEMPTS: u32 = 100;
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// A disk as fronts see it.
pub type ServedDisk = Aligned<Chain<AnyStore>>;

/// One DISK, open.
pub struct Open {
    /// The disk.
    pub disk: Arc<ServedDisk>,
    /// Its exports' names.
    pub names: Vec<String>,
    /// What the guest reads as its serial number.
    pub serial: String,
    /// For messages: where it is.
    pub label: String,
    /// For messages: what it is.
    pub kind: String,
    /// Refuse writes.
    pub read_only: bool,
}

/// What is to be opened, and how.
pub struct Opening {
    /// The disks.
    pub specs: Vec<DiskSpec>,
    /// Their format, where they do not say it.
    pub format: Option<Format>,
    /// How their bytes are reached.
    pub cache: CacheMode,
    /// Folders that parents may lie in.
    pub allow_parents: Vec<std::path::PathBuf>,
}

impl Opening {
    /// Opens the disks; those that were opened before one failed are in `into`.
    ///
    /// # Errors
    /// As [`Chain::open`].
    pub fn open(&self, engine: &Engine, into: &mut Vec<Open>) -> Result<()> {
        let names = export_names(&self.specs);
        for (spec, names) in self.specs.iter().zip(names) {
            let options = OpenOptions {
                format: spec.format.or(self.format),
                read_only: spec.read_only,
                allow_parents: self.allow_parents.clone(),
                ..OpenOptions::default()
            };
            let chain = self.open_patiently(engine, spec, &options)?;
            let kind = disks::describe(&chain);
            let serial = spec.serial.clone().or_else(|| spec.name.clone()).unwrap_or_else(|| spec.source.stem());
            into.push(Open {
                disk: Arc::new(Aligned::new(chain)),
                names,
                serial,
                label: spec.source.label(),
                kind,
                read_only: spec.read_only,
            });
        }
        Ok(())
    }

    /// Opens a disk; one that is busy is tried for some time. A server that was just killed is the reason: the kernel keeps
    /// its files open, and their locks, for as long as it takes to wind up its io_uring.
    fn open_patiently(&self, engine: &Engine, spec: &DiskSpec, options: &OpenOptions) -> Result<Chain<AnyStore>> {
        let cache = self.cache;
        let open = || {
            let (source, options) = (spec.source.clone(), options.clone());
            engine.run_on(0, move || async move { disks::open(cache, &source, &options).await })
        };
        for _ in 0..BUSY_ATTEMPTS {
            match open() {
                Err(error) if error.kind() == ErrorKind::Busy => std::thread::sleep(BUSY_PAUSE),
                result => return result,
            }
        }
        open()
    }
}

/// Flushes the disks, so that closing them soon after takes little time. A failure is told by that close.
pub fn flush(engine: &Engine, disks: &[Open]) {
    for open in disks {
        let disk = open.disk.clone();
        let _ = engine.run_on(0, move || async move { disk.flush().await });
    }
}

/// Closes the disks, each whatever became of the others. The first error, `result`'s before all, is returned; the
/// others are told at once.
///
/// # Errors
/// The first.
pub fn close(engine: &Engine, disks: Vec<Open>, mut result: Result<()>) -> Result<()> {
    for open in disks {
        let disk = open.disk;
        let closed = engine.run_on(0, move || async move { disk.close().await });
        match (&result, closed) {
            (Ok(()), closed) => result = closed,
            (Err(_), Err(another)) => complain(another),
            (Err(_), Ok(())) => {}
        }
    }
    result
}

/// Each disk's export names, by the rule in the help of `spile serve`.
fn export_names(disks: &[DiskSpec]) -> Vec<Vec<String>> {
    let several = disks.len() > 1;
    let names = disks.iter().enumerate().map(|(number, spec)| {
        let own = spec.name.clone().or_else(|| several.then(|| spec.source.stem()));
        let default = (number == 0).then(String::new);
        let mut names: Vec<String> = default.into_iter().chain(own).collect();
        names.dedup();
        names
    });
    names.collect()
}

/// The disk that is exported under `name`.
pub fn find<'a>(disks: &'a [Open], name: &str) -> Option<&'a Open> {
    disks.iter().find(|open| open.names.iter().any(|other| other == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(disks: &[&str]) -> Vec<Vec<String>> {
        export_names(&disks.iter().map(|disk| disk.parse().unwrap()).collect::<Vec<_>>())
    }

    #[test]
    fn the_first_disk_is_the_default_export() {
        assert_eq!(names(&["a.vhd"]), [[""]]);
        assert_eq!(names(&["a.vhd,name=x"]), [["", "x"]]);
        assert_eq!(names(&["a.vhd,name="]), [[""]]);
        assert_eq!(names(&["a.vhd", "b.raw,name=y"]), [vec!["", "a"], vec!["y"]]);
    }
}
