//! The world of a measurement: a Xen host in this process, guests and back ends in theirs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_lab::xen::{Host, toolstack};
use spile_xen::DomId;
use spile_xen::store::XenStore;

use super::filled::{fits, room_bytes};
pub use super::folder::Folder;
use super::guest::{Answer, COMMAND, DiskSetup, Order};
use super::process::{Talking, Tied};
use super::rings::RingPath;

/// How long anything may take that is not measured.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is behind the disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Nothing: reads bring zeroes, writes are dropped.
    Null,
    /// Memory of the back end.
    Memory,
    /// A file for each disk in this folder.
    Folder(PathBuf),
}

impl Storage {
    /// The folder of the disks' files, where there are some.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Self::Folder(path) => Some(path),
            Self::Null | Self::Memory => None,
        }
    }
}

impl std::str::FromStr for Storage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "null" => Ok(Self::Null),
            "mem" => Ok(Self::Memory),
            _ if Path::new(text).is_dir() => Ok(Self::Folder(text.into())),
            _ => Err(format!("there is no folder `{text}`; use null, mem or a folder for the disks' files")),
        }
    }
}

impl std::fmt::Display for Storage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Memory => f.write_str("mem"),
            Self::Folder(path) => write!(f, "{}", path.display()),
        }
    }
}

/// The disks' files, removed when this is dropped.
pub struct Disks {
    storage: Storage,
    size_bytes: u64,
    /// The folder of the files, from the first one on.
    folder: Option<Folder>,
    /// Bytes that they may have together, as [`room_bytes`] said before the first one.
    room_bytes: u64,
    /// Bytes of those that were made.
    made_bytes: u64,
}

impl Disks {
    /// Disks of one size.
    pub fn new(storage: Storage, size_bytes: u64) -> Self {
        Self { storage, size_bytes, folder: None, room_bytes: 0, made_bytes: 0 }
    }

    /// Makes a disk; what the command line and the key `params` call it.
    ///
    /// # Errors
    /// When its file cannot be made, `Exists` when it is there; `NoSpace` when all files together would take more than a quarter of the free
    /// space.
    pub fn add(&mut self, name: &str) -> Result<String> {
        match &self.storage {
            Storage::Null => Ok(format!("null:{}", self.size_bytes)),
            Storage::Memory => Ok(format!("mem:{}", self.size_bytes)),
            Storage::Folder(dir) => {
                if self.folder.is_none() {
                    self.room_bytes = room_bytes(dir)?;
                }
                fits(dir, self.made_bytes + self.size_bytes, self.room_bytes)?;
                self.made_bytes += self.size_bytes;
                // The folders of the disks that there are stay, whatever fails.
                let folder = match self.folder.take() {
                    Some(folder) => folder,
                    None => Folder::inside(dir, "disks")?,
                };
                let path = self.folder.insert(folder).path().join(format!("{name}.raw"));
                let made = std::fs::File::create_new(&path).and_then(|file| file.set_len(self.size_bytes));
                made.map_err(|e| Error::io("make a disk", e)).at_path(&path)?;
                Ok(path.display().to_string())
            }
        }
    }

    /// True when what was written matters to a read.
    pub fn keep_data(&self) -> bool {
        self.storage != Storage::Null
    }
}

/// A disk that a guest is to have.
#[derive(Clone, Debug)]
pub struct WantedDisk {
    /// How it is reached.
    pub path: RingPath,
    /// What it is.
    pub params: String,
    /// The longest request.
    pub max_request_bytes: u64,
    /// Requests that the back end keeps the times of; 0: none.
    pub traced: u32,
    /// More arguments of the back end's process.
    pub arguments: &'static [&'static str],
}

/// The host with its guests.
pub struct World {
    // In this order: who uses the host ends before it.
    guests: BTreeMap<u16, Talking>,
    backends: Vec<Tied>,
    store: XenStore,
    run_dir: PathBuf,
    lab: PathBuf,
    _host: Host,
}

/// The `number`th disk of a guest, as Linux numbers xvda, xvdb … and those after the sixteenth.
fn device(number: usize) -> u32 {
    let number = number as u32;
    if number < 16 { 202 << 8 | number << 4 } else { 1 << 28 | number << 8 }
}

impl World {
    /// A host without guests in `folder`.
    ///
    /// # Errors
    /// As [`Host::start`].
    pub fn new(folder: &Path) -> Result<Self> {
        let (lab, run_dir) = (folder.join("lab"), folder.join("run"));
        let host = Host::start(&lab)?;
        std::fs::create_dir_all(&run_dir).map_err(|e| Error::io("make the folder", e)).at_path(&run_dir)?;
        let store = XenStore::open(&host.xenstored())?;
        Ok(Self { guests: BTreeMap::new(), backends: Vec::new(), store, run_dir, lab, _host: host })
    }

    /// Starts a guest with these disks, whose numbers are their places then.
    ///
    /// # Errors
    /// When a process does not start, or a disk does not connect.
    pub fn add_guest(&mut self, domain: u16, wanted: &[WantedDisk]) -> Result<()> {
        let setups: Vec<DiskSetup> = wanted.iter().enumerate().map(|(number, disk)| disk.setup(number)).collect();
        let pages: u64 = setups.iter().map(DiskSetup::memory_bytes).sum();
        let guest = Talking::start(format!("guest {domain}"), [COMMAND.into()])?;
        self.guests.insert(domain, guest);
        let create = Order::Create { lab: self.lab.clone(), domain, memory_bytes: pages + (1 << 20) };
        self.ask(domain, &create)?;
        for (disk, setup) in wanted.iter().zip(&setups) {
            self.add_disk(domain, disk, setup.device)?;
        }
        self.ask(domain, &Order::Connect(setups)).map_err(|error| self.first_fallen(error))?;
        Ok(())
    }

    /// If a back end has ended, that is the better explanation.
    fn first_fallen(&mut self, error: Error) -> Error {
        self.backends.iter_mut().find_map(|backend| backend.check().err()).unwrap_or(error)
    }

    fn add_disk(&mut self, domain: u16, disk: &WantedDisk, device: u32) -> Result<()> {
        let vbd = toolstack::Vbd { device, ..toolstack::Vbd::new(DomId(domain), disk.params.clone()) };
        toolstack::add_vbd(&mut self.store, &vbd)?;
        let path = vbd.backend_path();
        let mut args: Vec<std::ffi::OsString> = vec!["xen-disk".into(), path.clone().into()];
        args.extend(["--lab".into(), self.lab.clone().into(), "--run-dir".into(), self.run_dir.clone().into()]);
        args.extend(["--access".into(), disk.path.access.into()]);
        if disk.path.is_split {
            args.push("--split-rings".into());
        }
        args.extend(disk.arguments.iter().map(Into::into));
        if disk.traced > 0 {
            args.extend(["--trace".into(), disk.traced.to_string().into()]);
        }
        self.backends.push(Tied::start(format!("the back end {path}"), args)?);
        Ok(())
    }

    /// The trace of a guest's disk.
    pub fn trace(&self, domain: u16, disk: usize) -> PathBuf {
        self.run_dir.join(format!("{domain}-{}.trace", device(disk)))
    }

    /// Tells a guest what to do, and waits until it is done.
    ///
    /// # Errors
    /// What the guest says.
    pub fn ask(&mut self, domain: u16, order: &Order) -> Result<Answer> {
        self.tell(domain, order)?;
        self.hear(domain, Duration::ZERO)
    }

    /// Tells a guest what to do.
    ///
    /// # Errors
    /// When it is gone.
    pub fn tell(&mut self, domain: u16, order: &Order) -> Result<()> {
        let text = serde_json::to_string(order).expect("plain fields");
        self.guest(domain)?.say(&text)
    }

    /// A guest's answer to what it was told, which takes so long to do.
    ///
    /// # Errors
    /// What the guest says.
    pub fn hear(&mut self, domain: u16, work: Duration) -> Result<Answer> {
        let line = self.guest(domain)?.hear(PATIENCE + work)?;
        match serde_json::from_str(&line) {
            Ok(Answer::Failed(why)) => Err(Error::new(ErrorKind::Io, format!("guest {domain}: {why}"))),
            Ok(answer) => Ok(answer),
            Err(e) => Err(Error::new(ErrorKind::Protocol, format!("guest {domain} answers nonsense")).caused_by(e)),
        }
    }

    fn guest(&mut self, domain: u16) -> Result<&mut Talking> {
        let missing = || Error::new(ErrorKind::NotFound, format!("there is no guest {domain}"));
        self.guests.get_mut(&domain).ok_or_else(missing)
    }
}

impl WantedDisk {
    fn setup(&self, number: usize) -> DiskSetup {
        DiskSetup {
            device: device(number),
            indirect_segments: self.path.indirect_segments,
            is_persistent: self.path.access == "persistent",
            is_split: self.path.is_split,
            ring_slots: self.path.slots(),
            max_request_bytes: self.max_request_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_numbered_as_linux_does() {
        assert_eq!((device(0), device(1), device(15)), (51712, 51728, 51952));
        assert_eq!(device(16), 268_439_552);
    }

    #[test]
    fn files_of_disks_go_with_them() {
        let dir = tempfile::tempdir().unwrap();
        let storage: Storage = dir.path().to_str().unwrap().parse().unwrap();
        let mut disks = Disks::new(storage, 1 << 20);
        let path = disks.add("a").unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20);
        assert!(disks.keep_data() && disks.add("a").is_err());
        drop(disks);
        assert!(!Path::new(&path).exists());
    }

    #[test]
    fn storage_has_names() {
        assert_eq!(("null".parse(), "mem".parse()), (Ok(Storage::Null), Ok(Storage::Memory)));
        assert!("/nowhere/at/all".parse::<Storage>().is_err());
        assert_eq!(Disks::new(Storage::Memory, 4096).add("a").unwrap(), "mem:4096");
    }
}
