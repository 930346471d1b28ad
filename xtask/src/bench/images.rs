//! The images that are measured, made when first asked for.

use super::Plan;
use super::kinds::{Front, Kind};
use super::lines::{Cache, Format, Side, State};
use super::server::Server;
use crate::{Result, shell};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Spile's name for a disk without a file, and its size in bytes.
pub const NULL: &str = "null:1G";
pub const NULL_BYTES: u64 = 1 << 30;

/// Random writes into each child of a chain.
const CHILD_WRITES: u64 = 4000;

/// Makes images and remembers which it has made.
pub struct Images<'a> {
    plan: &'a Plan,
    folder: PathBuf,
    made: BTreeSet<PathBuf>,
}

impl<'a> Images<'a> {
    /// None made yet; what a run before left is removed.
    pub fn new(plan: &'a Plan) -> Images<'a> {
        let images = Images { plan, folder: plan.folder.join("work"), made: BTreeSet::new() };
        images.remove();
        images
    }

    /// The image for one point of `side`.
    pub fn get(&mut self, side: &Side) -> Result<PathBuf> {
        match side.state {
            _ if side.format == Format::Null => Ok(NULL.into()),
            State::Full | State::Again => self.full(side.format),
            State::Fresh => self.fresh(side.format),
            State::Chain(depth) => self.chain(depth),
            State::Child => self.child(side),
            State::Mapped => self.mapped(),
        }
    }

    /// Puts the images that are served from the page cache there as a plain read does: after other ways to read and
    /// write, the cache of one image may lie in larger pieces than that of another.
    pub fn warm(&mut self, sides: &[Side]) -> Result<()> {
        for side in sides {
            let is_whole = side.state == State::Full;
            if is_whole && side.cache == Cache::Page && side.format != Format::Null {
                let path = self.get(side)?;
                read_again(&path)?;
            }
        }
        Ok(())
    }

    /// Has the host find memory for first writes of `total_bytes` before they are measured: as much is written to a file, which is
    /// removed again. Without an amount it is that of a full image. Memory that was not used for long, or never, may have to be taken
    /// from somewhere else first, and then one side pays for it and the next one does not.
    pub fn warm_page_cache(&self, total_bytes: Option<u64>) -> Result<()> {
        let path = self.folder.join("warm.raw");
        write_and_remove(&path, total_bytes.unwrap_or(self.size_bytes()))
            .map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Removes all that was made.
    pub fn remove(&self) {
        for entry in std::fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            // What cannot be removed is made anew or fails with a better message there.
            let _ = std::fs::remove_file(entry.path());
        }
    }

    fn size_bytes(&self) -> u64 {
        if self.plan.quick { 64 << 20 } else { 1 << 30 }
    }

    /// An image with every byte written, as `format`.
    fn full(&mut self, format: Format) -> Result<PathBuf> {
        let raw = self.folder.join("full.raw");
        if self.made.insert(raw.clone()) {
            fill(&raw, self.size_bytes())?;
        }
        let path = match format {
            Format::Raw => return Ok(raw),
            Format::Vhd => self.folder.join("full.vhd"),
            Format::Vpc => self.folder.join("full.vpc"),
            Format::Qcow2 => self.folder.join("full.qcow2"),
            Format::Null => return Ok(NULL.into()),
        };
        if self.made.insert(path.clone()) {
            shell::run(self.convert(format).arg(&raw).arg(&path).stdout(Stdio::null()))?;
        }
        Ok(path)
    }

    fn convert(&self, format: Format) -> Command {
        match format {
            Format::Raw | Format::Vhd | Format::Null => self.spile(&["convert"]),
            Format::Vpc => qemu_img(&["convert", "-O", "vpc", "-o", "subformat=dynamic,force_size=on"]),
            Format::Qcow2 => qemu_img(&["convert", "-O", "qcow2"]),
        }
    }

    /// A new empty image, eight times as large as the full ones: random writes rarely meet.
    fn fresh(&mut self, format: Format) -> Result<PathBuf> {
        let size = (8 * self.size_bytes()).to_string();
        let path = self.folder.join(match format {
            Format::Raw | Format::Null => "fresh.raw",
            Format::Vhd => "fresh.vhd",
            Format::Vpc => "fresh.vpc",
            Format::Qcow2 => "fresh.qcow2",
        });
        let _ = std::fs::remove_file(&path);
        let mut command = match format {
            Format::Raw | Format::Vhd | Format::Null => self.spile(&["create"]),
            Format::Vpc => qemu_img(&["create", "-f", "vpc", "-o", "subformat=dynamic,force_size=on"]),
            Format::Qcow2 => qemu_img(&["create", "-f", "qcow2"]),
        };
        match format {
            Format::Raw | Format::Vhd | Format::Null => command.arg(&path).args(["--size", &size]),
            Format::Vpc | Format::Qcow2 => command.arg(&path).arg(&size),
        };
        shell::run(command.stdout(Stdio::null()))?;
        Ok(path)
    }

    /// The leaf of a chain of `depth` files: a full one, and children with scattered writes.
    fn chain(&mut self, depth: usize) -> Result<PathBuf> {
        let mut below = self.full(Format::Vhd)?;
        for level in 2..=depth {
            let leaf = self.folder.join(format!("chain-{level}.vhd"));
            if self.made.insert(leaf.clone()) {
                let mut create = self.spile(&["create"]);
                create.arg(&leaf).arg("--parent").arg(&below);
                shell::run(create.stdout(Stdio::null()))?;
                self.scatter(&leaf, level)?;
            }
            below = leaf;
        }
        Ok(below)
    }

    /// A new child of the full image of the side's format. Both programs follow their defaults.
    fn child(&mut self, side: &Side) -> Result<PathBuf> {
        let parent = self.full(side.format)?;
        let path = self.folder.join(if side.is_ours() { "child-of-spile.qcow2" } else { "child-of-qemu.qcow2" });
        let _ = std::fs::remove_file(&path);
        let mut command = match side.is_ours() {
            true => self.spile(&["create", "--parent"]),
            false => qemu_img(&["create", "-f", "qcow2", "-F", "qcow2", "-b"]),
        };
        shell::run(command.arg(&parent).arg(&path).stdout(Stdio::null()))?;
        Ok(path)
    }

    /// See [`State::Mapped`].
    fn mapped(&mut self) -> Result<PathBuf> {
        let path = self.folder.join("mapped.qcow2");
        if self.made.insert(path.clone()) {
            let mut create = qemu_img(&["create", "-f", "qcow2", "-o", "cluster_size=4k,preallocation=metadata"]);
            shell::run(create.arg(&path).arg((128 * self.size_bytes()).to_string()).stdout(Stdio::null()))?;
        }
        Ok(path)
    }

    fn scatter(&self, leaf: &Path, seed: usize) -> Result<()> {
        let side = Side::new("making", Kind::Spile(Front::Nbd), Format::Vhd, Cache::Page);
        let server = Server::start(self.plan, &side, leaf)?;
        let writes = if self.plan.quick { CHILD_WRITES / 20 } else { CHILD_WRITES };
        let mut load = self.spile(&["load", "--rw", "randwrite", "--bs", "4k", "--json"]);
        load.args(["--ios", &writes.to_string(), "--seed", &seed.to_string()]).arg(server.uri());
        shell::run(load.stdout(Stdio::null()))
    }

    fn spile(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.plan.spile);
        command.args(words);
        command
    }
}

/// Drops a file from the page cache, once all that was written to it is durable.
pub fn forget(path: &Path) -> Result<()> {
    let problem = |error: std::io::Error| format!("{}: {error}", path.display());
    let file = std::fs::File::open(path).map_err(problem)?;
    file.sync_all().map_err(problem)?;
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).map_err(|errno| problem(errno.into()))
}

/// Drops a file from the page cache and reads it, front to back, without reading ahead: then the cache has it in pages of 4 KiB. Reading ahead puts it
/// there in larger pieces, as large as the host's `read_ahead_kb`, and ext4 looks at each block of a piece for a write of 4 KiB (Linux 6.18: 48 µs in pieces of
/// 8 MiB, 4 µs in pages), whoever writes. Guests that read and write here and there leave pages.
fn read_again(path: &Path) -> Result<()> {
    forget(path)?;
    let problem = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut file = std::fs::File::open(path).map_err(problem)?;
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM).map_err(|errno| problem(errno.into()))?;
    let mut piece = vec![0; 1 << 20];
    while file.read(&mut piece).map_err(problem)? > 0 {}
    Ok(())
}

/// Fills a new file and removes it, before much of it is written back.
fn write_and_remove(path: &Path, len_bytes: u64) -> std::io::Result<()> {
    let mut file = std::fs::File::create(path)?;
    let written = std::io::copy(&mut std::io::repeat(1).take(len_bytes), &mut file);
    std::fs::remove_file(path)?;
    written.map(|_| ())
}

fn qemu_img(words: &[&str]) -> Command {
    let mut command = Command::new("qemu-img");
    command.args(words);
    command
}

/// Fills a new file with bytes that no one can take for zeros or compress.
pub fn fill(path: &Path, size_bytes: u64) -> Result<()> {
    let problem = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut file = std::fs::File::create(path).map_err(problem)?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut chunk = vec![0_u8; 1 << 20];
    for _ in 0..size_bytes >> 20 {
        for word in chunk.chunks_exact_mut(8) {
            // xorshift: quick, and good enough to be incompressible.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        file.write_all(&chunk).map_err(problem)?;
    }
    file.sync_all().map_err(problem)
}
