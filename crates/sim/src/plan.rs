//! [`Plan`]: all that a seed decides about one run, drawn before it begins.

use crate::faults::Faults;
use crate::oracle::Crash;
use crate::rng::Rng;
use crate::world::Hardware;

/// One life of the process, from open to crash.
#[derive(Clone, Debug)]
pub struct Life {
    /// The number of steps after which the life ends (`None`: it closes in order).
    pub crash_at: Option<u64>,
    /// The kind of its crash, if it crashes.
    pub crash: Crash,
    /// The number of requests of the workload.
    pub requests: u64,
    /// The largest number of requests in flight. Each is a task.
    pub clients: u64,
    /// Everything is read back before the workload begins.
    pub verify_first: bool,
    /// Injected faults.
    pub faults: Faults,
}

/// How often each request is made, in parts of their sum.
#[derive(Clone, Debug)]
pub struct Weights {
    /// Plain writes.
    pub write: u64,
    /// Writes with FUA.
    pub fua: u64,
    /// Reads.
    pub read: u64,
    /// Flushes.
    pub flush: u64,
    /// Discards.
    pub discard: u64,
    /// Write-zeroes.
    pub zeroes: u64,
    /// Questions for the map.
    pub extents: u64,
}

/// Where requests go.
#[derive(Clone, Debug)]
pub struct Places {
    /// Sectors that most requests are near to.
    pub hot: Vec<u64>,
    /// How far from them, in sectors.
    pub spread: u64,
    /// A length in sectors whose multiples are good places, too: the format's block.
    pub block: u64,
    /// Requests in 100 that go anywhere.
    pub anywhere: u64,
    /// The longest write in sectors.
    pub max_write: u64,
    /// The longest discard or zeroing in sectors.
    pub max_discard: u64,
}

/// One run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed that the plan was drawn from.
    pub seed: u64,
    /// The kind of host.
    pub hardware: Hardware,
    /// The lives of the process. The explorer adds a last, quiet one.
    pub lives: Vec<Life>,
    /// How often each kind of request is made.
    pub weights: Weights,
    /// Where requests go.
    pub places: Places,
}

impl Plan {
    /// The plan of `seed` for a disk of `size_bytes` that is made of blocks of `block_bytes`.
    pub fn draw(seed: u64, size_bytes: u64, block_bytes: u64) -> Self {
        let mut rng = Rng::new(seed).split(10);
        let mut hardware = Hardware::draw(&mut rng);
        hardware.devices = Rng::new(seed).split(12).chance(1, 6);
        let lives = (0..rng.between(1, 5)).map(|_| Life::draw(&mut rng)).collect();
        let weights = Weights::draw(&mut rng);
        let places = Places::draw(&mut rng, size_bytes / 512, block_bytes / 512);
        Self { seed, hardware, lives, weights, places }
    }

    /// A short plan of one life, for trying a crash at every step of it.
    pub fn short(seed: u64, size_bytes: u64, block_bytes: u64) -> Self {
        let mut plan = Self::draw(seed, size_bytes, block_bytes);
        let mut life = Life::draw(&mut Rng::new(seed).split(11));
        (life.crash_at, life.requests, life.clients) = (None, 10, 2);
        (life.verify_first, life.faults) = (false, Faults::default());
        plan.weights.flush = plan.weights.flush.max(3);
        plan.lives = vec![life];
        plan
    }
}

impl Hardware {
    fn draw(rng: &mut Rng) -> Self {
        let align_bytes = *rng.pick(&[512, 512, 4096]);
        Self { align_bytes, punches: !rng.chance(1, 6), devices: false }
    }
}

impl Life {
    /// A life without faults and without a crash, of so many requests.
    pub fn quiet(requests: u64, clients: u64) -> Self {
        Self { crash_at: None, crash: Crash::Death, requests, clients, verify_first: true, faults: Faults::default() }
    }

    fn draw(rng: &mut Rng) -> Self {
        let crash_at = match rng.below(8) {
            0 => None,
            1 | 2 => Some(rng.skewed(60)),
            3 => Some(rng.skewed(3000)),
            _ => Some(rng.between(20, 900)),
        };
        let crash = if rng.chance(1, 2) { Crash::Death } else { Crash::PowerCut };
        let faults = if rng.chance(1, 8) { draw_faults(rng) } else { Faults::default() };
        let requests = rng.between(4, 120);
        let (clients, verify_first) = (rng.between(1, 8), rng.chance(1, 2));
        Self { crash_at, crash, requests, clients, verify_first, faults }
    }
}

fn draw_faults(rng: &mut Rng) -> Faults {
    let mut faults = Faults::default();
    match rng.below(6) {
        0 => faults.read_eio = rng.between(10, 300),
        1 => faults.write_eio = rng.between(10, 300),
        2 => faults.no_space = rng.between(10, 500),
        3 => faults.sync_eio = rng.between(200, 3000),
        4 => faults.space_bytes = Some(rng.between(16, 2048) << 12),
        _ => faults.slow = rng.between(100, 1000),
    }
    faults
}

impl Weights {
    fn draw(rng: &mut Rng) -> Self {
        let rarely = |rng: &mut Rng, high| if rng.chance(2, 3) { rng.below(high) } else { 0 };
        Self {
            write: 40,
            fua: rarely(rng, 10),
            read: rng.between(5, 40),
            flush: rng.skewed(20),
            discard: rarely(rng, 30),
            zeroes: rarely(rng, 20),
            extents: rarely(rng, 8),
        }
    }
}

impl Places {
    fn draw(rng: &mut Rng, size: u64, block: u64) -> Self {
        let border = |rng: &mut Rng| rng.below(size / block + 1) * block;
        let spot = |rng: &mut Rng| if rng.chance(1, 2) { border(rng) } else { rng.below(size) };
        Self {
            hot: (0..rng.between(1, 4)).map(|_| spot(rng).min(size - 1)).collect(),
            spread: rng.skewed(128),
            block,
            anywhere: *rng.pick(&[0, 10, 50]),
            max_write: *rng.pick(&[8, 16, 64]),
            max_discard: *rng.pick(&[16, block, block * 3]),
        }
    }
}
