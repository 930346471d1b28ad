//! A block device that takes requests and does not answer them.

use std::path::Path;

use crate::common::loop_device::LoopDevice;
use crate::frozen::Frozen;
use crate::guard::Guardian;

/// So many requests the device takes before it has others wait: more than one worker may have in the kernel.
const TAGS: &str = "2048";

/// A loop device over a file of a file system that is frozen. At the end it is thawed.
pub struct DeadDevice {
    // In the order of their ends: the device can be detached when its requests have ended.
    frozen: Frozen,
    device: LoopDevice,
    _guardian: Guardian,
}

impl DeadDevice {
    /// Makes it; it answers still. The error says why that cannot be done here.
    pub fn new() -> Result<Self, String> {
        let frozen = Frozen::new()?;
        let device = LoopDevice::over(&frozen.path().join("disk"))?;
        let guardian = Guardian::new(&format!("losetup -d '{}'", device.path));
        let queue = Path::new("/sys/block").join(device.path.trim_start_matches("/dev/")).join("queue");
        for (name, value) in [("scheduler", "mq-deadline"), ("nr_requests", TAGS)] {
            std::fs::write(queue.join(name), value).map_err(|error| format!("{name} of a loop device: {error}"))?;
        }
        Ok(Self { frozen, device, _guardian: guardian })
    }

    pub fn path(&self) -> &Path {
        Path::new(&self.device.path)
    }

    /// From now on, no request is answered.
    pub fn stop(&self) {
        self.frozen.freeze();
    }

    /// Answers all that were not answered, and goes on.
    pub fn go_on(&self) {
        self.frozen.thaw();
    }
}
