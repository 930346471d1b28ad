//! A file system on a loop device that can be frozen: every write to it then waits until it is thawed.

use std::path::Path;
use std::process::Command;

use crate::common::folder;
use crate::common::loop_device::LoopDevice;
use crate::fuse::FILE_BYTES;
use crate::guard::Guardian;

/// An ext4 file system of its own. At the end it is thawed and unmounted.
pub struct Frozen {
    // In the order of their ends.
    _guardian: Guardian,
    _device: LoopDevice,
    _image: tempfile::TempDir,
    dir: tempfile::TempDir,
}

impl Frozen {
    /// Makes and mounts it. The error says why that cannot be done here.
    pub fn new() -> Result<Self, String> {
        let (image, dir) = (folder(), folder());
        let file = image.path().join("ext4");
        std::fs::File::create(&file).unwrap().set_len(6 * FILE_BYTES).unwrap();
        let device = LoopDevice::over(&file)?;
        run("mkfs.ext4", &["-q".as_ref(), device.path.as_ref()])?;
        run("mount", &[device.path.as_ref(), dir.path()])?;
        let at = dir.path().display();
        let guardian = Guardian::new(&format!("fsfreeze -u '{at}'; umount -l '{at}'; losetup -d '{}'", device.path));
        for name in ["disk", "closed", "opened"] {
            let file = std::fs::File::create(dir.path().join(name)).unwrap();
            file.set_len(FILE_BYTES).unwrap();
        }
        Ok(Self { _guardian: guardian, _device: device, _image: image, dir })
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn freeze(&self) {
        run("fsfreeze", &["-f".as_ref(), self.path()]).unwrap();
    }

    pub fn thaw(&self) {
        run("fsfreeze", &["-u".as_ref(), self.path()]).unwrap();
    }
}

fn run(program: &str, arguments: &[&Path]) -> Result<(), String> {
    let done = Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    if done.status.success() {
        return Ok(());
    }
    Err(format!("{program}: {}", String::from_utf8_lossy(&done.stderr).trim()))
}
