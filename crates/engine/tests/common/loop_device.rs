//! A loop device over a file, for tests on block devices. Only root may make one.

use std::path::Path;
use std::process::Command;

/// A loop device. It is detached when the value is dropped, also when a test fails.
pub struct LoopDevice {
    /// Its path.
    pub path: String,
}

impl LoopDevice {
    /// Makes a loop device over `file`. The error says why there cannot be one here.
    #[allow(dead_code, reason = "most of the test programs need it")]
    pub fn over(file: &Path) -> Result<Self, String> {
        let file = file.to_str().ok_or("the path is not UTF-8")?;
        losetup(&["--find", "--show", file]).map(|path| Self { path })
    }

    /// The same with sectors of so many bytes.
    #[allow(dead_code, reason = "some of the test programs need it")]
    pub fn with_sectors(file: &Path, sector_bytes: u32) -> Result<Self, String> {
        let file = file.to_str().ok_or("the path is not UTF-8")?;
        let sector = sector_bytes.to_string();
        losetup(&["--find", "--show", "--sector-size", &sector, file]).map(|path| Self { path })
    }

    /// Has the device take up the length of its file.
    #[allow(dead_code, reason = "one of the test programs needs it")]
    pub fn take_up_len(&self) {
        losetup(&["--set-capacity", &self.path]).unwrap();
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = losetup(&["--detach", &self.path]);
    }
}

fn losetup(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("losetup").args(arguments).output().map_err(|error| format!("losetup: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}
