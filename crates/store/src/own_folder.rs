//! Folders of Spile's own, such as that of the control sockets: nobody else may change which names are in them, whatever the umask is.

use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;
use spile_core::{Error, ErrorKind, Result, ResultExt as _};

use crate::folder::{Folder, failed, is_trusted};

/// Everybody may look, and its owner alone may change it.
const FOLDER_MODE: Mode = Mode::from_raw_mode(0o755);
/// Whoever may write in a folder may remove only what is his own.
const STICKY: u32 = 0o1000;

/// The folder at `path`, which is made with those above it where they are missing.
///
/// # Errors
/// `Denied` when another user than root and this one owns it or may write there, or may exchange it: nothing in it could be believed. The
/// system's.
pub fn make(path: &Path) -> Result<Folder> {
    let path = std::path::absolute(path).map_err(failed("make the folder")).at_path(path)?;
    let folder = make_any(&path)?;
    refuse_foreign(&path)?;
    Ok(folder)
}

fn make_any(path: &Path) -> Result<Folder> {
    match Folder::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        found => return found,
    }
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else { return Folder::open(path) };
    let above = make_any(above)?;
    make_in(&above, name).map_err(failed("make the folder")).at_path(path)?;
    Folder::open(path)
}

fn make_in(above: &Folder, name: &OsStr) -> io::Result<()> {
    match rustix::fs::mkdirat(above, name, FOLDER_MODE) {
        // Another process was first.
        Err(Errno::EXIST) => return Ok(()),
        made => made?,
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = rustix::fs::openat(above, name, flags, Mode::empty())?;
    if rustix::fs::fstat(&made)?.st_uid == rustix::process::geteuid().as_raw() {
        // The umask may have taken away too much, or too little where the folder above gives rights to others.
        rustix::fs::fchmod(&made, FOLDER_MODE)?;
    }
    Ok(())
}

/// Refuses a folder in which others may change names, and one that they may exchange for another.
///
/// # Errors
/// As [`make`].
pub fn refuse_foreign(path: &Path) -> Result<()> {
    let folder = Folder::open(path)?;
    let stat = stat_of(&folder)?;
    if !is_trusted(stat.st_uid) || stat.st_mode & 0o022 != 0 {
        let (owner, mode) = (stat.st_uid, stat.st_mode & 0o7777);
        let what =
            format!("others may write in this folder: it belongs to the user {owner} and has the mode {mode:04o}");
        let hint = "nothing in it is believed: `chmod go-w` it after a look at what is in it, or name another one by SPILE_RUN_DIR";
        return Err(Error::new(ErrorKind::Denied, what).at_path(folder.path()).hint(hint));
    }
    for above in folder.path().ancestors().skip(1) {
        let stat = stat_of(&Folder::open(above)?)?;
        let may_exchange = stat.st_mode & 0o022 != 0 && stat.st_mode & STICKY == 0;
        if !is_trusted(stat.st_uid) || may_exchange {
            let what = format!(
                "others may put another folder in its place: {} belongs to the user {} and has the mode {:04o}",
                above.display(),
                stat.st_uid,
                stat.st_mode & 0o7777
            );
            let hint = "`chmod go-w` that folder, or name one by SPILE_RUN_DIR that lies where only root and this user may write";
            return Err(Error::new(ErrorKind::Denied, what).at_path(folder.path()).hint(hint));
        }
    }
    Ok(())
}

fn stat_of(folder: &Folder) -> Result<Stat> {
    rustix::fs::fstat(folder).map_err(|errno| failed("stat")(errno.into())).at_path(folder.path())
}

/// True for root and this user: what they say is believed.
pub fn is_trusted_user(user: u32) -> bool {
    is_trusted(user)
}

/// Refuses the socket at `path` unless root or this user has made it: others may answer there what they like.
///
/// # Errors
/// `Denied`, without an errno; none where nothing is at `path`, as the connection says that better.
pub fn refuse_foreign_socket(path: &Path) -> Result<()> {
    match path.metadata() {
        Ok(stat) if !is_trusted(stat.uid()) => Err(foreign_socket(stat.uid())).at_path(path),
        _ => Ok(()),
    }
}

/// The error of a socket behind which a process of `user` is.
pub fn foreign_socket(user: u32) -> Error {
    let what = format!("the socket is that of the user {user}, and is not believed");
    Error::new(ErrorKind::Denied, what).hint("run the command as that user")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn chmod(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_folder_is_made_with_those_above_it_and_refused_when_others_may_write_there() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("a/run");
        make(&run).unwrap();
        for folder in [run.clone(), dir.path().join("a")] {
            assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o755);
        }
        make(&run).expect("it is there");
        for mode in [0o777, 0o775, 0o1777] {
            chmod(&run, mode);
            let error = make(&run).unwrap_err();
            assert!(error.kind() == ErrorKind::Denied && error.to_string().contains("chmod"), "{error}");
        }
        chmod(&run, 0o700);
        make(&run).unwrap();
        chmod(&dir.path().join("a"), 0o777);
        assert_eq!(make(&run).unwrap_err().kind(), ErrorKind::Denied);
        chmod(&dir.path().join("a"), 0o1777);
        make(&run).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&run, Some(4242), None).unwrap();
            assert!(make(&run).unwrap_err().to_string().contains("4242"));
        }
    }
}
