use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, RenameFlags};

use super::*;

/// Exchanges two names again and again until it is dropped.
struct Exchanger {
    ends: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Exchanger {
    fn start(a: &Path, b: &Path) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let (a, b, end) = (a.to_owned(), b.to_owned(), ends.clone());
        let exchange = move || {
            while !end.load(Ordering::Relaxed) {
                let _ = rustix::fs::renameat_with(CWD, &a, CWD, &b, RenameFlags::EXCHANGE);
            }
        };
        Self { ends, thread: Some(std::thread::spawn(exchange)) }
    }
}

impl Drop for Exchanger {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn folder() -> (tempfile::TempDir, Folder) {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::open(dir.path()).unwrap();
    (dir, folder)
}

fn name(text: &str) -> &OsStr {
    OsStr::new(text)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A user that is neither root nor this one.
const TENANT: u32 = 12345;

fn give_to_tenant(path: &Path) {
    std::os::unix::fs::lchown(path, Some(TENANT), Some(TENANT)).unwrap();
}

#[test]
fn a_way_goes_through_links_of_ours() {
    let (dir, _) = folder();
    let real = dir.path().canonicalize().unwrap();
    std::fs::create_dir_all(real.join("a/b")).unwrap();
    std::fs::write(real.join("a/b/f"), "text").unwrap();
    symlink("a", real.join("to-a")).unwrap();
    symlink(real.join("to-a/b"), real.join("a/whole")).unwrap();
    symlink("../to-a/b/f", real.join("a/file")).unwrap();
    symlink("loop", real.join("loop")).unwrap();
    for (way, end) in
        [("a/b", "a/b"), ("to-a/b", "a/b"), ("a/whole", "a/b"), ("a/whole/..", "a"), ("a/../to-a/./b", "a/b")]
    {
        assert_eq!(Folder::open(&real.join(way)).unwrap().path(), real.join(end), "{way}");
    }
    for (way, end, is_elsewhere) in
        [("a/b/f", "a/b/f", false), ("a/file", "a/b/f", true), ("to-a/none", "a/none", true)]
    {
        let place = Folder::find(&real.join(way)).unwrap();
        assert_eq!((place.path(), place.is_elsewhere()), (real.join(end), is_elsewhere), "{way}");
    }
    let looped = Folder::find(&real.join("loop")).unwrap_err();
    assert_eq!(looped.os_errno(), Some(libc::ELOOP));
    assert_eq!(Folder::open(&real.join("no/b")).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(Folder::open(&real.join("a/b/f")).is_err());
    assert_eq!(Folder::find(Path::new("/")).unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[test]
fn a_file_that_is_open_has_a_path_in_proc() {
    let (dir, folder) = folder();
    let file = folder.create(name("f")).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    std::fs::remove_file(dir.path().join("f")).unwrap();
    let place = Folder::find(Path::new(&path)).unwrap();
    let again = place.open(OpenMode::ReadWrite).unwrap();
    assert_eq!(again.metadata().unwrap().ino(), file.metadata().unwrap().ino());
}

#[test]
fn links_of_others_lead_only_to_what_is_theirs() {
    if !is_root() {
        return println!("SKIP links of other users: needs root");
    }
    let (dir, _) = folder();
    let at = |name: &str| dir.path().join(name);
    for file in ["ours", "theirs"] {
        std::fs::write(at(file), file).unwrap();
        symlink(at(file), at(&format!("to-{file}"))).unwrap();
        give_to_tenant(&at(&format!("to-{file}")));
    }
    give_to_tenant(&at("theirs"));
    std::fs::create_dir(at("folder")).unwrap();
    symlink(at("folder"), at("to-folder")).unwrap();
    give_to_tenant(&at("to-folder"));
    let open = |name: &str| Folder::find(&at(name)).and_then(|place| place.open(OpenMode::ReadOnly));
    open("to-theirs").unwrap();
    let error = open("to-ours").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(error.to_string().contains("user 12345"), "{error}");
    assert_eq!(Folder::of(&at("to-folder/new")).unwrap_err().kind(), ErrorKind::Denied);
    give_to_tenant(&at("folder"));
    Folder::of(&at("to-folder/new")).unwrap();
}

#[test]
fn what_is_no_file_is_refused_at_once() {
    let (dir, folder) = folder();
    rustix::fs::mkfifoat(&folder, "pipe", Mode::from_raw_mode(0o600)).unwrap();
    std::fs::create_dir(dir.path().join("folder")).unwrap();
    symlink("pipe", dir.path().join("link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
    for (what, said) in [("pipe", "pipe"), ("folder", "folder"), ("link", "link"), ("socket", "socket")] {
        let error = folder.open_file(name(what), OpenMode::ReadOnly).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(said), "{error}");
    }
    std::fs::write(dir.path().join("file"), "1234").unwrap();
    assert_eq!(folder.read(name("file"), 4).unwrap().unwrap(), b"1234");
    assert_eq!(folder.read(name("file"), 3).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(folder.read(name("none"), 3).unwrap(), None);
    let mut names = folder.list().unwrap();
    names.sort();
    assert_eq!(names, ["file", "folder", "link", "pipe", "socket"]);
}

#[test]
fn a_name_is_one_component() {
    let (_dir, folder) = folder();
    for bad in ["", ".", "..", "a/b", "/etc/passwd"] {
        assert!(folder.create(name(bad)).is_err() && folder.unlink(name(bad)).is_err(), "{bad}");
    }
}

#[test]
fn a_dangling_link_is_not_created_through() {
    let (dir, folder) = folder();
    symlink(dir.path().join("elsewhere"), dir.path().join("new")).unwrap();
    assert_eq!(folder.create(name("new")).unwrap_err().kind(), ErrorKind::Exists);
    assert!(!dir.path().join("elsewhere").exists());
}

#[test]
fn names_are_changed_only_for_the_files_that_are_expected() {
    let (dir, folder) = folder();
    let text = |name: &str| std::fs::read_to_string(dir.path().join(name)).ok();
    for name in ["a", "b", "c"] {
        std::fs::write(dir.path().join(name), name).unwrap();
    }
    let id = |what: &str| folder.id(name(what)).unwrap().unwrap();
    let [a, b, c] = ["a", "b", "c"].map(id);
    let rename = |from: (&str, FileId), to: (&str, Option<FileId>)| {
        folder.rename((name(from.0), from.1), &folder, (name(to.0), to.1)).map_err(|error| error.kind())
    };
    assert_eq!(rename(("a", b), ("b", Some(b))), Err(ErrorKind::Busy));
    assert_eq!(rename(("a", a), ("b", Some(c))), Err(ErrorKind::Busy));
    assert_eq!(rename(("a", a), ("b", None)), Err(ErrorKind::Exists));
    assert_eq!(rename(("none", a), ("b", Some(b))), Err(ErrorKind::NotFound));
    assert_eq!(folder.remove(name("a"), b).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(["a", "b", "c"].map(text), ["a", "b", "c"].map(|text| Some(text.to_owned())));
    rename(("a", a), ("b", Some(b))).unwrap();
    rename(("b", a), ("d", None)).unwrap();
    folder.remove(name("c"), c).unwrap();
    assert_eq!(["a", "b", "c", "d"].map(text), [None, None, None, Some("a".to_owned())]);
    assert_eq!(folder.list().unwrap(), ["d"]);
}

#[test]
fn a_file_gets_a_second_name_by_its_descriptor() {
    let (dir, folder) = folder();
    std::fs::write(dir.path().join("a"), "a").unwrap();
    std::fs::write(dir.path().join("b"), "b").unwrap();
    let a = folder.open_file(name("a"), OpenMode::ReadOnly).unwrap();
    folder.link_from(&a, (&folder, name("a")), name("c")).unwrap();
    assert_eq!(folder.id(name("a")).unwrap(), folder.id(name("c")).unwrap());
    assert_eq!(folder.link_from(&a, (&folder, name("a")), name("b")).unwrap_err().kind(), ErrorKind::Exists);
    assert_eq!(folder.link_from(&a, (&folder, name("b")), name("d")).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(folder.id(name("d")).unwrap(), None);
}

/// While somebody exchanges `b` and `other`, the file `other` is never lost, whatever is renamed over `b`.
#[test]
fn a_name_that_is_exchanged_at_the_moment_of_a_rename_is_not_replaced() {
    let (dir, folder) = folder();
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("other"), "other").unwrap();
    let other = folder.id(name("other")).unwrap().unwrap();
    let (mut renamed, mut refused) = (0, 0);
    for _ in 0..200 {
        std::fs::write(path("a"), "a").unwrap();
        std::fs::write(path("b"), "b").unwrap();
        let [a, b] = ["a", "b"].map(|what| folder.id(name(what)).unwrap().unwrap());
        let exchanger = Exchanger::start(&path("b"), &path("other"));
        match folder.rename((name("a"), a), &folder, (name("b"), Some(b))) {
            Ok(()) => renamed += 1,
            Err(_) => refused += 1,
        }
        drop(exchanger);
        let left = folder.list().unwrap();
        let found =
            left.iter().find(|name| folder.id(name).unwrap() == Some(other)).expect("the other file is there").clone();
        std::fs::rename(path(found.to_str().unwrap()), path("kept")).unwrap();
        for name in folder.list().unwrap().iter().filter(|name| *name != "kept") {
            std::fs::remove_file(dir.path().join(name)).unwrap();
        }
        std::fs::rename(path("kept"), path("other")).unwrap();
    }
    assert_eq!(renamed + refused, 200);
}

#[test]
fn a_hidden_name_is_new_and_fits() {
    let (dir, folder) = folder();
    let long = OsString::from("x".repeat(255));
    let (_, a) = folder.create_hidden(&long, NEW_FILE_MODE).unwrap();
    let (_, b) = folder.create_hidden(&long, NEW_FILE_MODE).unwrap();
    assert!(a != b && dir.path().join(a).exists() && dir.path().join(b).exists());
}

#[test]
fn access_is_copied_to_the_file_that_is_open() {
    let (dir, folder) = folder();
    let old = folder.create(name("old")).unwrap();
    let new = folder.create(name("new")).unwrap();
    old.set_permissions(std::fs::Permissions::from_mode(0o640)).unwrap();
    if is_root() {
        give_to_tenant(&dir.path().join("old"));
    }
    std::fs::rename(dir.path().join("new"), dir.path().join("moved")).unwrap();
    std::fs::write(dir.path().join("new"), "").unwrap();
    let before = folder.stat(name("new")).unwrap().st_mode;
    copy_access(&old, &new).unwrap();
    let moved = folder.stat(name("moved")).unwrap();
    let was = old.metadata().unwrap();
    assert_eq!((moved.st_mode & 0o777, moved.st_uid, moved.st_gid), (0o640, was.uid(), was.gid()));
    assert_eq!(folder.stat(name("new")).unwrap().st_mode, before);
}
