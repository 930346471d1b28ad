//! What a disk's images look like from outside, so that changes by other programs are noticed: the [`Stamp`] in the file of changed blocks.
//!
//! The first half of a stamp is the leaf's number in its file system, and when the file was made: numbers are given again. The file system's
//! own number is left out, as some change with each boot. The second half is a hash of the leaf's length, when it was last written and when
//! its properties were last changed, and of the same of all parents, but for their properties: a child's snapshot changes those.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use spile_core::{Env as _, Store as _};
use spile_engine::{OsEnv, run_blocking, sleep};
use spile_image::layer::Layer as _;
use spile_image::{Graph, GraphLayer};
use spile_life::changes::Found;
use spile_life::changes::header::Stamp;
use spile_store::{FileId, FileTimes, HostStore};

use crate::family;
use crate::new_file::folder_of;

/// No kernel counts the time of writes more coarsely.
const COARSEST: Duration = Duration::from_millis(10);

/// What the images of `graph` look like now. When the leaf's path names another file than the one that is open, a look that is never the same.
pub async fn stamp(graph: &Graph<HostStore>) -> Stamp {
    let leaf = graph.handles()[0].path().to_owned();
    let (layers, id) = (paths(graph), graph.handles()[0].image().store().file_id());
    let look = move || {
        let stat = leaf.metadata().ok().filter(|stat| Some(FileId::of(stat)) == id)?;
        Some(stamp_of(&FileTimes::of(&stat), layers[1..].iter().map(|path| times_of(path))))
    };
    run_blocking(graph.handles()[0].path(), look).await.unwrap_or_else(unlike_any)
}

/// As [`found`], of a disk that is open and is just to get its file of changed blocks at `side`.
pub async fn now(graph: &Graph<HostStore>, side: &Path) -> Found {
    let (stamp, folder) = (stamp(graph).await, folder_of(side).to_owned());
    let mount_id = run_blocking(side, move || mount_id(&folder)).await;
    Found { stamp, is_written_behind: false, mount_id }
}

/// As [`now`], of the image at `image`, which is to be a disk of this file of changed blocks.
pub async fn at(image: &Path, side: &Path) -> Found {
    let (image, folder) = (image.to_owned(), folder_of(side).to_owned());
    run_blocking(side, move || {
        let stamp = image.metadata().map(|stat| stamp_of(&FileTimes::of(&stat), [])).unwrap_or_else(|_| unlike_any());
        Found { stamp, is_written_behind: false, mount_id: mount_id(&folder) }
    })
    .await
}

/// What the old image of a disk, the first one, and its parents look like: which files they are, how long they are, and when they were last written, as one line.
/// Another one after each write that begins later. `None` when that cannot be seen; when they are written just now; and when the old image shows somewhere else,
/// too, what is written to it: as the parent of another image, or under another name.
pub async fn of_old_image(paths: &[PathBuf]) -> Option<String> {
    let first = paths.first()?;
    let look = async || {
        let paths = paths.to_vec();
        run_blocking(first, move || seen(&paths)).await
    };
    let before = look().await?;
    family::refuse_lost_parent(first).await.ok()?;
    // A later write has another time then.
    sleep(COARSEST * 2).await;
    look().await.filter(|look| *look == before)
}

fn seen(paths: &[PathBuf]) -> Option<String> {
    paths.first()?.symlink_metadata().ok().filter(|stat| stat.is_file() && stat.nlink() == 1)?;
    let one = |path: &PathBuf| {
        let FileTimes { inode, born_ns, len_bytes, modified_ns, .. } = FileTimes::of(&path.metadata().ok()?);
        (born_ns != 0).then(|| format!("{inode} {born_ns} {len_bytes} {modified_ns}"))
    };
    paths.iter().map(one).collect::<Option<Vec<_>>>().map(|all| all.join(" / "))
}

/// The number of the mount that `path` is in. It is given to no other mount until the host starts again, so it tells whether a file system was
/// mounted anew. 0 on a kernel before 6.8, which gives numbers again.
fn mount_id(path: &Path) -> u64 {
    // The kernel's STATX_MNT_ID_UNIQUE.
    let unique = StatxFlags::from_bits_retain(0x4000);
    match statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, unique) {
        Ok(stat) if stat.stx_mask & unique.bits() != 0 => stat.stx_mnt_id,
        _ => 0,
    }
}

/// The stamp of a disk that is closed and still locked. It waits until a later write by another program would have another time.
pub async fn last_stamp(graph: &Graph<HostStore>) -> Stamp {
    loop {
        let found = stamp(graph).await;
        let leaf = graph.handles()[0].path().to_owned();
        let data = data_file(&graph.handles()[0]);
        let modified = |path: &Path| path.metadata().and_then(|stat| stat.modified()).ok();
        let written =
            run_blocking(&leaf.clone(), move || modified(&leaf).max(data.as_deref().and_then(modified))).await;
        let age = written.and_then(|at| SystemTime::now().duration_since(at).ok());
        match age {
            Some(age) if age <= COARSEST => sleep(COARSEST).await,
            _ => return found,
        }
    }
}

/// What the images of `graph`, which was just opened, looked like before this process has written to them. `side` is the disk's file of
/// changed blocks.
pub async fn found(graph: &Graph<HostStore>, side: &Path) -> Found {
    let leaf = &graph.handles()[0];
    // Its data file, too, was as it was found when it was opened: guests may write there by now.
    let data = data_file(leaf).zip(leaf.image().data_store().found());
    let (layers, beside, leaf) = (paths(graph), side.to_owned(), leaf.image().store().found());
    let look = move || {
        let mount_id = mount_id(&beside);
        let Some(leaf) = leaf else { return Found { stamp: unlike_any(), is_written_behind: true, mount_id } };
        let modified_ns = data.as_ref().map_or(0, |(_, found)| found.modified_ns);
        let last = FileTimes { modified_ns: leaf.modified_ns.max(modified_ns), ..leaf };
        let is_written_behind = boot_time().and_then(|boot| is_written_behind(&last, &beside, boot)).unwrap_or(true);
        let found = |path: &PathBuf| match &data {
            Some((data, found)) if data == path => *found,
            _ => times_of(path),
        };
        Found { stamp: stamp_of(&leaf, layers[1..].iter().map(found)), is_written_behind, mount_id }
    };
    run_blocking(side, look).await
}

/// The layers' paths, leaf first, and those of other files that hold their data.
fn paths(graph: &Graph<HostStore>) -> Vec<PathBuf> {
    let layers = graph.handles().iter().map(|layer| layer.path().to_owned());
    layers.chain(graph.handles().iter().filter_map(|layer| data_file(layer))).collect()
}

/// The file that holds the data of `layer`, if that is another one: who writes there need not write to the image.
fn data_file(layer: &GraphLayer<HostStore>) -> Option<PathBuf> {
    let (image, data) = (layer.image().store(), layer.image().data_store());
    (!std::ptr::eq(image, data)).then(|| data.path().to_owned())
}

/// What the file at `path` looks like. One that is not there is another one than it was, or lies on another host.
fn times_of(path: &Path) -> FileTimes {
    path.metadata().map(|stat| FileTimes::of(&stat)).unwrap_or_default()
}

fn stamp_of(leaf: &FileTimes, others: impl IntoIterator<Item = FileTimes>) -> Stamp {
    let (mut own, mut theirs) = (Hash::new(), Hash::new());
    [leaf.len_bytes, leaf.modified_ns, leaf.changed_ns].into_iter().for_each(|word| own.add(word));
    for times in others {
        [times.inode, times.len_bytes, times.modified_ns].into_iter().for_each(|word| theirs.add(word));
    }
    let mut bytes = [0; 32];
    for (word, into) in [leaf.inode, leaf.born_ns, own.0, theirs.0].into_iter().zip(bytes.chunks_exact_mut(8)) {
        into.copy_from_slice(&word.to_le_bytes());
    }
    Stamp(bytes)
}

/// True when the image was written in this boot of the host, and no process of ours had the disk open in it: each one writes `side`. Nobody can
/// tell where files have no time of birth: another one may have got the number of the image.
fn is_written_behind(leaf: &FileTimes, side: &Path, boot: SystemTime) -> Option<bool> {
    if leaf.born_ns == 0 {
        return None;
    }
    let seen = side.metadata().and_then(|stat| stat.modified()).ok()?;
    Some(seen < boot && UNIX_EPOCH + Duration::from_nanos(leaf.modified_ns) > boot)
}

/// When the host was started.
fn boot_time() -> Option<SystemTime> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    let seconds = stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(UNIX_EPOCH + Duration::from_secs(seconds))
}

/// A stamp that no other look gives.
pub fn unlike_any() -> Stamp {
    let mut bytes = [0; 32];
    bytes[..16].copy_from_slice(&OsEnv.random_16());
    bytes[16..].copy_from_slice(&OsEnv.random_16());
    Stamp(bytes)
}

/// FNV-1a, which stays the same in all builds.
struct Hash(u64);

impl Hash {
    fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, word: u64) {
        for byte in word.to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, write};

    use super::*;

    fn times(path: &Path) -> FileTimes {
        FileTimes::of(&path.metadata().unwrap())
    }

    #[test]
    fn each_way_to_change_an_image_changes_its_look() {
        let dir = tempfile::tempdir().unwrap();
        let [leaf, parent, other] = ["a", "b", "c"].map(|name| dir.path().join(name));
        [&leaf, &parent, &other].into_iter().for_each(|path| write(path, [0; 512]).unwrap());
        let look = || stamp_of(&times(&leaf), [times_of(&parent)]);
        let before = look();
        assert_eq!(look(), before);
        let set_time = |path: &Path, seconds| {
            File::options().write(true).open(path).unwrap().set_modified(UNIX_EPOCH + Duration::from_secs(seconds))
        };
        set_time(&parent, 5).unwrap();
        let with_parent = look();
        assert!(with_parent != before && with_parent.is_same_file(&before));
        set_time(&leaf, 5).unwrap();
        let written = look();
        assert!(written != with_parent && written.is_same_file(&before));
        // A copy in its place, with the same content and the same time.
        set_time(&other, 5).unwrap();
        std::fs::rename(&other, &leaf).unwrap();
        assert!(!look().is_same_file(&before));
    }

    #[test]
    fn a_write_in_this_boot_by_nobody_of_ours_shows() {
        let dir = tempfile::tempdir().unwrap();
        let [leaf, side] = ["a", "b"].map(|name| dir.path().join(name));
        let boot = boot_time().unwrap();
        let set = |path: &Path, time| File::create(path).unwrap().set_modified(time).unwrap();
        let (before, after) = (boot - Duration::from_secs(9), boot + Duration::from_secs(9));
        for (written, seen, is_behind) in [(before, before, false), (after, before, true), (after, after, false)] {
            set(&leaf, written);
            set(&side, seen);
            assert_eq!(is_written_behind(&times(&leaf), &side, boot), Some(is_behind));
        }
        let unborn = FileTimes { born_ns: 0, ..times(&leaf) };
        assert_eq!(is_written_behind(&unborn, &side, boot), None);
    }

    #[test]
    fn files_of_one_mount_tell_one_number() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path().join("a"), "").unwrap();
        let [folder, file, proc] = [dir.path(), &dir.path().join("a"), Path::new("/proc")].map(mount_id);
        if folder == 0 {
            return println!("SKIP: the kernel tells no numbers of mounts");
        }
        assert!(folder == file && folder != proc, "{folder} {file} {proc}");
    }
}
