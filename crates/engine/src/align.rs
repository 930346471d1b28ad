//! Finds out which alignment direct I/O on a file needs.
//!
//! The sources, in this order: statx (STATX_DIOALIGN, Linux 6.1), the sector size of a block device, trial reads. What
//! statx reports is right: on ext4 over a disk with 512-byte sectors it reports 512 for offsets and for memory; there a
//! 4 KiB read to an address aligned to 4 bytes fails with EINVAL, and one to an address aligned to 512 bytes succeeds.
//!
//! A trial read proves something only where a wrong alignment is refused. In a hole, and past the end of the file, ext4
//! and XFS answer without a check of the alignment. So one byte is tried first. Where even that is answered, an
//! alignment of a page is assumed.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::fs::{AtFlags, StatxFlags};
use spile_mem::{PAGE_BYTES, Segment};

/// The alignments of direct I/O in bytes: powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectAlign {
    /// The alignment of offsets and lengths in the file.
    pub offset: u32,
    /// The alignment of addresses in memory.
    pub memory: u32,
}

/// The alignments that are tried where neither the file system nor a device tells, in bytes.
const CANDIDATES: [u32; 2] = [512, 4096];
/// An alignment in bytes that suits every disk.
const SAFE: u32 = 4096;

/// The alignment of direct I/O on a file; `None` when the file has no direct I/O. `direct` has to be open with
/// O_DIRECT, and readable. This blocks for a trial read where the file system does not tell.
pub fn find(direct: &File) -> Option<DirectAlign> {
    let sector_bytes = sector_bytes(direct.as_fd());
    decide(reported(direct), sector_bytes, |align| trial_read(direct, align))
}

/// Chooses the alignment: a plausible report of statx counts; else the sector of a device, or the result of a trial, is
/// used for offsets and for memory.
fn decide(
    reported: Option<DirectAlign>,
    sector_bytes: Option<u32>,
    mut trial: impl FnMut(u32) -> bool,
) -> Option<DirectAlign> {
    let plausible = |n: u32| n.is_power_of_two() && n <= 1 << 20;
    // Our memory is aligned to pages: a larger alignment cannot be kept.
    let possible = |n: u32| n.is_power_of_two() && n <= PAGE_BYTES as u32;
    match reported {
        // Zeroes in the report mean that the file has no direct I/O.
        Some(DirectAlign { offset: 0, .. }) => return None,
        Some(align) if plausible(align.offset) && possible(align.memory) => return Some(align),
        _ => (),
    }
    let both = |n| DirectAlign { offset: n, memory: n };
    let sector = sector_bytes.filter(|n| possible(*n) && trial(*n));
    if sector.is_some() {
        return sector.map(both);
    }
    let tried = if trial(1) { Some(SAFE) } else { CANDIDATES.into_iter().find(|n| trial(*n)) };
    tried.map(both)
}

/// The alignment that statx reports; `None` where the kernel or the file system reports none.
fn reported(file: &File) -> Option<DirectAlign> {
    let mask = StatxFlags::DIOALIGN;
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, mask).ok()?;
    let told = stat.stx_mask & mask.bits() != 0;
    told.then_some(DirectAlign { offset: stat.stx_dio_offset_align, memory: stat.stx_dio_mem_align })
}

/// Reads `align` bytes at the offset and the address `align`, which are aligned to `align` and to nothing larger.
fn trial_read(file: &File, align: u32) -> bool {
    let align = align as usize;
    let segment = Segment::zeroed((2 * align).max(PAGE_BYTES)).slice(align..2 * align);
    // SAFETY: the segment is alive and as long as said.
    let got = unsafe { libc::pread(file.as_raw_fd(), segment.as_ptr().cast(), segment.len(), align as i64) };
    got >= 0
}

/// The sector size of a block device in bytes; `None` for anything else.
fn sector_bytes(device: BorrowedFd<'_>) -> Option<u32> {
    rustix::fs::ioctl_blksszget(device).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn both(n: u32) -> Option<DirectAlign> {
        Some(DirectAlign { offset: n, memory: n })
    }

    #[test]
    fn a_report_is_believed_without_a_trial() {
        let report = DirectAlign { offset: 4096, memory: 4 };
        assert_eq!(decide(Some(report), Some(512), |_| panic!("no trial")), Some(report));
        assert_eq!(decide(both(0), Some(512), |_| panic!("no trial")), None);
    }

    #[test]
    fn without_a_report_the_smallest_that_works_is_taken() {
        assert_eq!(decide(None, None, |n| n >= 512), both(512));
        assert_eq!(decide(None, None, |n| n >= 4096), both(4096));
        assert_eq!(decide(None, Some(4096), |_| true), both(4096));
        assert_eq!(decide(None, None, |_| false), None);
    }

    #[test]
    fn who_refuses_nothing_has_proven_nothing() {
        assert_eq!(decide(None, None, |_| true), both(4096));
    }

    #[test]
    fn a_report_that_no_memory_can_meet_is_not_believed() {
        let report = DirectAlign { offset: 512, memory: 8192 };
        assert_eq!(decide(Some(report), None, |n| n >= 512), both(512));
    }

    #[test]
    fn a_file_here_takes_what_was_found() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, vec![7; 1 << 16]).unwrap();
        let mut options = File::options();
        std::os::unix::fs::OpenOptionsExt::custom_flags(options.read(true), libc::O_DIRECT);
        let Ok(file) = options.open(&path) else {
            return println!("SKIP direct I/O: not on this file system");
        };
        let found = find(&file).expect("an alignment");
        assert!(trial_read(&file, found.offset.max(found.memory)));
        // The trial alone must agree with what the file system reports, or be stricter.
        let tried = decide(None, None, |n| trial_read(&file, n)).expect("an alignment");
        assert!(tried.offset >= found.offset && tried.memory >= found.memory, "{tried:?} {found:?}");
    }

    proptest! {
        #[test]
        fn the_answer_is_always_usable(
            offset in any::<u32>(), memory in any::<u32>(), told in any::<bool>(),
            sector in proptest::option::of(any::<u32>()), need in 0u32..14,
        ) {
            let report = told.then_some(DirectAlign { offset, memory });
            let mut tried = Vec::new();
            let found = decide(report, sector, |n| { tried.push(n); n >= 1 << need });
            if let Some(found) = found {
                prop_assert!(found.offset.is_power_of_two() && found.memory.is_power_of_two());
                let by_trial = if need == 0 && sector != Some(found.offset) { 1 } else { found.offset };
                prop_assert!(report == Some(found) || tried.last() == Some(&by_trial));
                prop_assert!(found.memory as usize <= PAGE_BYTES);
                prop_assert!(report == Some(found) || found.offset >= 1 << need);
            }
        }
    }
}
