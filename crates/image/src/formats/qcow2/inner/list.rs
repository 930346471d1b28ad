//! The table of the snapshots inside an image: what it tells, who comes next, and what a new table holds.

use spile_core::{Error, ErrorKind, Result};

use crate::formats::qcow2::codec::header::{Header, MAX_SNAPSHOTS};
use crate::formats::qcow2::codec::printable;
use crate::formats::qcow2::codec::snapshot::{MAX_TABLE_BYTES, Snapshot};
use crate::inner::InnerSnapshot;

/// The longest name in bytes that QEMU shows as a whole.
const MAX_NAME_BYTES: usize = 255;

/// What the image tells of a snapshot.
pub(super) fn told(snapshot: &Snapshot) -> InnerSnapshot {
    InnerSnapshot {
        id: printable(&snapshot.id),
        name: printable(&snapshot.name),
        taken_unix_s: snapshot.taken_s,
        size_bytes: snapshot.disk_bytes(),
        state_bytes: snapshot.state_bytes(),
    }
}

/// The same of several.
pub(super) fn told_all(all: &[Snapshot]) -> Vec<InnerSnapshot> {
    all.iter().map(told).collect()
}

/// The id of the next snapshot: a number that is higher than all others.
///
/// # Errors
/// `Exists` when the name is taken, by a name or an id; `InvalidInput` for one that cannot be; `Unsupported` when there is no other id.
pub(super) fn new_id(all: &[Snapshot], name: &str) -> Result<String> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
        let what = format!("{name:?} cannot be the name of a snapshot inside an image");
        let hint = format!("choose one of 1 to {MAX_NAME_BYTES} bytes without control characters");
        return Err(Error::new(ErrorKind::InvalidInput, what).hint(hint));
    }
    if all.iter().any(|one| one.name == name.as_bytes() || one.id == name.as_bytes()) {
        let error = Error::new(ErrorKind::Exists, format!("a snapshot inside the image has the name or id {name:?}"));
        return Err(error.hint("choose another name; spile internal-snapshot --list shows those that there are"));
    }
    let number = |one: &Snapshot| std::str::from_utf8(&one.id).ok().and_then(|id| id.parse::<u64>().ok());
    let highest = all.iter().filter_map(number).max().unwrap_or(0);
    let next = highest.checked_add(1).map(|id| id.to_string());
    next.ok_or_else(|| Error::new(ErrorKind::Unsupported, "the image has a snapshot with the highest id that there is"))
}

/// The entry of a new snapshot of the disk of `header`, but for the place of its L1 table.
pub(super) fn entry(id: &str, name: &str, now_unix_s: u64, header: &Header) -> Snapshot {
    let taken_s = u32::try_from(now_unix_s).unwrap_or(u32::MAX);
    let (id, name) = (id.as_bytes().to_vec(), name.as_bytes().to_vec());
    let disk = Snapshot { l1_entries: header.l1_entries, taken_s, id, name, ..Snapshot::default() };
    disk.extended(header.size_bytes)
}

/// The bytes of a table of these snapshots.
///
/// # Errors
/// `Unsupported` for more snapshots, or a longer table, than QEMU reads.
pub(super) fn to_bytes(all: &[Snapshot]) -> Result<Vec<u8>> {
    let bytes: Vec<u8> = all.iter().flat_map(Snapshot::to_bytes).collect();
    if all.len() > MAX_SNAPSHOTS as usize || bytes.len() as u64 > MAX_TABLE_BYTES {
        let what = format!("an image has no more than {MAX_SNAPSHOTS} snapshots inside it, in a table of 64 MiB");
        return Err(Error::new(ErrorKind::Unsupported, what).hint("delete some: spile internal-snapshot --delete"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(id: &str, name: &str) -> Snapshot {
        Snapshot { id: id.into(), name: name.into(), ..Snapshot::default() }
    }

    #[test]
    fn an_id_is_higher_than_all_and_a_name_is_new() {
        let all = [snapshot("7", "a"), snapshot("x9", "b"), snapshot("2", "c")];
        assert_eq!((new_id(&all, "d").unwrap(), new_id(&[], "d").unwrap()), ("8".to_owned(), "1".to_owned()));
        let kind = |name: &str| new_id(&all, name).unwrap_err().kind();
        assert_eq!((kind("a"), kind("7"), kind("x9")), (ErrorKind::Exists, ErrorKind::Exists, ErrorKind::Exists));
        assert_eq!(
            (kind(""), kind("a\nb"), kind(&"n".repeat(256))),
            (ErrorKind::InvalidInput, ErrorKind::InvalidInput, ErrorKind::InvalidInput)
        );
        let last = [snapshot(&u64::MAX.to_string(), "a")];
        assert_eq!(new_id(&last, "b").unwrap_err().kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn no_more_snapshots_than_qemu_reads() {
        let one = Snapshot { name: vec![b'n'; 65535], ..snapshot("1", "") };
        assert_eq!(to_bytes(&vec![one; 1024]).unwrap_err().kind(), ErrorKind::Unsupported);
        assert!(to_bytes(&vec![snapshot("1", "a"); 65536]).is_ok());
        assert_eq!(to_bytes(&vec![snapshot("1", "a"); 65537]).unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
