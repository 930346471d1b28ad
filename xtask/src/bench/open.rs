//! How long it takes to open chains of thirty, and a qcow2 disk of 16 TiB, and what memory that takes: once with nothing in them, once with a
//! base that is full and children with every 64th block, or table.

use super::Plan;
use super::kinds::Front;
use super::report::Report;
use super::server::{Server, pinned, server_cores};
use crate::{Result, shell};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Every how many blocks (VHD) or tables (qcow2) one is there, in a child of the chain that is not empty.
const CHILD_STRIDE: u64 = 64;

/// A format, and the disk that is opened.
struct Form {
    name: &'static str,
    /// The virtual size, as `spile create` takes it.
    size: &'static str,
    /// Images of its chain.
    depth: usize,
    /// Gives every n-th part of a new image a place.
    allocate: fn(&Path, u64) -> std::io::Result<()>,
    /// What that part is.
    part: &'static str,
}

/// 2040 GiB is the largest size that VHD allows.
const FORMS: [Form; 3] = [
    Form { name: "vhd", size: "2040G", depth: 30, allocate: allocate_vhd, part: "block" },
    Form { name: "qcow2", size: "2040G", depth: 30, allocate: allocate_qcow2, part: "table" },
    Form { name: "qcow2", size: "16T", depth: 1, allocate: allocate_qcow2, part: "table" },
];

/// Measures from exec to the first accepted connection, `rounds` times each.
pub fn run(plan: &Plan, report: &mut Report) -> Result<()> {
    for form in &FORMS {
        run_form(plan, form, report)?;
    }
    Ok(())
}

fn run_form(plan: &Plan, form: &Form, report: &mut Report) -> Result<()> {
    let depth = if plan.quick { form.depth.min(3) } else { form.depth };
    let folder = plan.folder.join("open");
    for is_full in [false, true] {
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let leaf = chain(plan, &folder, form, depth, is_full)?;
        let mut times_ms = Vec::new();
        let mut memory_kib = Vec::new();
        for _ in 0..plan.rounds.max(3) {
            let (time_ms, peak_kib) = open_once(plan, &leaf)?;
            times_ms.push(time_ms);
            memory_kib.push(peak_kib);
        }
        let what = match (is_full, depth) {
            (false, _) => "empty".to_owned(),
            (true, 1) => "full".to_owned(),
            (true, _) => format!("base full, every {CHILD_STRIDE}th {} in each child", form.part),
        };
        report.add_opening(form.name, form.size, depth, &what, &mut times_ms, &mut memory_kib);
    }
    std::fs::remove_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))
}

fn chain(plan: &Plan, folder: &Path, form: &Form, depth: usize, is_full: bool) -> Result<PathBuf> {
    let mut leaf = PathBuf::new();
    for level in 1..=depth {
        let path = folder.join(format!("{level}.{}", form.name));
        let mut create = Command::new(&plan.spile);
        create.arg("create").arg(&path);
        match level {
            1 => create.args(["--size", form.size]),
            _ => create.arg("--parent").arg(&leaf),
        };
        shell::run(create.stdout(Stdio::null()))?;
        if is_full {
            let stride = if level == 1 { 1 } else { CHILD_STRIDE };
            (form.allocate)(&path, stride).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        leaf = path;
    }
    Ok(leaf)
}

/// Gives every `stride`-th block of a new VHD a place, as its BAT would say after years of writes. The blocks
/// themselves are holes: two TiB do not fit a test machine.
fn allocate_vhd(path: &Path, stride: u64) -> std::io::Result<()> {
    const SECTOR: u64 = 512;
    const BLOCK_SECTORS: u64 = (4096 + (2 << 20)) / SECTOR;
    let file = std::fs::File::options().read(true).write(true).open(path)?;
    let mut header = [0; 1024];
    file.read_exact_at(&mut header, SECTOR)?;
    let bat_offset = u64::from_be_bytes(header[16..24].try_into().unwrap_or_default());
    let entries = u64::from(u32::from_be_bytes(header[28..32].try_into().unwrap_or_default()));
    let mut footer = [0; SECTOR as usize];
    let len = file.metadata()?.len();
    file.read_exact_at(&mut footer, len - SECTOR)?;
    // Data begin on 4 KiB, one sector of bitmap before.
    let first = len.next_multiple_of(4096) / SECTOR + 7;
    let mut bat = vec![0xff; entries as usize * 4];
    let mut sector = first;
    for block in (0..entries).step_by(stride as usize) {
        bat[block as usize * 4..][..4].copy_from_slice(&(sector as u32).to_be_bytes());
        sector += BLOCK_SECTORS;
    }
    file.write_all_at(&bat, bat_offset)?;
    file.write_all_at(&footer, sector * SECTOR)
}

/// Gives every `stride`-th L2 table of a new qcow2 image a place. The tables are holes, so the image shows nothing that it did not before: opening
/// reads none of them, whatever is in them.
fn allocate_qcow2(path: &Path, stride: u64) -> std::io::Result<()> {
    const CLUSTER: u64 = 64 << 10;
    // The count of such a table is one, so it may be written in place.
    const COPIED: u64 = 1 << 63;
    let file = std::fs::File::options().read(true).write(true).open(path)?;
    let mut header = [0; 48];
    file.read_exact_at(&mut header, 0)?;
    let entries = u64::from(u32::from_be_bytes(header[36..40].try_into().unwrap_or_default()));
    let l1_offset = u64::from_be_bytes(header[40..48].try_into().unwrap_or_default());
    let mut place = file.metadata()?.len().next_multiple_of(CLUSTER);
    let mut l1 = vec![0; entries as usize * 8];
    for table in (0..entries).step_by(stride as usize) {
        l1[table as usize * 8..][..8].copy_from_slice(&(place | COPIED).to_be_bytes());
        place += CLUSTER;
    }
    file.write_all_at(&l1, l1_offset)?;
    file.set_len(place)
}

/// Milliseconds until it accepts, and its peak memory in KiB by then.
fn open_once(plan: &Plan, leaf: &Path) -> Result<(f64, f64)> {
    let socket = std::env::temp_dir().join(format!("spile-open-{}.sock", std::process::id()));
    let mut command = pinned(&server_cores(1), &plan.spile);
    command.arg("serve").arg(leaf).arg("--write-parent").arg("--nbd").arg(format!("unix:{}", socket.display()));
    let begun = Instant::now();
    let server = Server::spawn(&mut command, socket, Front::Nbd)?;
    let time_ms = begun.elapsed().as_secs_f64() * 1e3;
    Ok((time_ms, peak_memory_kib(server.pid())?))
}

fn peak_memory_kib(pid: u32) -> Result<f64> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    number.ok_or_else(|| format!("{path}: no VmHWM"))
}
