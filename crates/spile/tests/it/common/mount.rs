//! A file system of its own for a test, in a file.

use std::path::{Path, PathBuf};
use std::process::Command;

/// An ext4 file system, mounted. It is gone when the value is dropped, also when a test fails.
pub struct Mount {
    pub path: PathBuf,
}

impl Mount {
    /// A file system of so many bytes under `dir`; `None`, with the reason on stdout, where that cannot be.
    pub fn new(dir: &Path, size_bytes: u64, test: &str) -> Option<Self> {
        let (file, path) = (dir.join("ext4"), dir.join("mnt"));
        std::fs::File::create(&file).unwrap().set_len(size_bytes).unwrap();
        std::fs::create_dir_all(&path).unwrap();
        let made = run("mkfs.ext4", &["-q".as_ref(), "-F".as_ref(), file.as_os_str()]);
        let made = made.and_then(|()| mount(&file, &path));
        match made {
            Ok(()) => Some(Self { path }),
            Err(why) => {
                println!("SKIP {test}: no file system in a file can be mounted here: {}", why.trim());
                None
            }
        }
    }

    /// Unmounts it, once, and mounts it again. The error says why it cannot be unmounted.
    pub fn remount(&self) -> Result<(), String> {
        run("umount", &[self.path.as_os_str()])?;
        mount(&self.path.with_file_name("ext4"), &self.path)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = run("umount", &["-l".as_ref(), self.path.as_os_str()]);
    }
}

fn mount(file: &Path, path: &Path) -> Result<(), String> {
    run("mount", &["-o".as_ref(), "loop".as_ref(), file.as_os_str(), path.as_os_str()])
}

fn run(program: &str, args: &[&std::ffi::OsStr]) -> Result<(), String> {
    let done = Command::new(program).args(args).output().map_err(|error| format!("{program}: {error}"))?;
    if done.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&done.stderr).into_owned()) }
}
