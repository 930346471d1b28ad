//! Second names of files, and files that are opened anew in another mode while their locks stay. Another process has the file
//! open where it matters.

#[path = "../../engine/tests/common/mod.rs"]
mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::*;
use spile_core::{ErrorKind, Files, Locator, OpenMode, Segments, Store, Via};
use spile_engine::Engine;
use spile_store::{AnyStore, CacheMode, FileStore, OsFiles};

/// Names the file to the other process: the same test program, run once more.
const FILE: &str = "SPILE_TEST_REOPEN_FILE";

each_engine!(
    a_writer_that_is_reopened_for_reading_lets_readers_in,
    a_reader_that_is_reopened_for_writing_keeps_everybody_out,
    a_reader_gets_its_lock_back_from_a_writer_that_is_given_up,
    a_file_without_locks_gets_none,
    a_failed_sync_stays_known,
    a_second_name_is_the_same_file,
);

fn is_free(path: &Path, mode: OpenMode) -> bool {
    FileStore::open(path, mode, CacheMode::Page).is_ok()
}

async fn open(files: &OsFiles, path: &Path, mode: OpenMode) -> AnyStore {
    files.open(&Locator::from(path), mode).await.unwrap()
}

async fn first_bytes(store: &AnyStore) -> Vec<u8> {
    let into = Segments::from(spile_engine::pool().try_alloc(4096).unwrap());
    store.read_at(at(0), &into, Via::Direct).await.unwrap();
    let mut bytes = vec![0; 4096];
    into.copy_to_slice(0, &mut bytes);
    bytes
}

fn a_writer_that_is_reopened_for_reading_lets_readers_in(engine: &Engine) {
    let (dir, path, store) = patterned(64 * KIB);
    drop(store);
    engine.run_on(0, move || async move {
        let (files, other) = (OsFiles::default(), dir.path().join("other"));
        let old = open(&files, &path, OpenMode::ReadWrite).await;
        // As a snapshot does: the path names another file by now.
        std::fs::rename(&path, &other).unwrap();
        std::fs::write(&path, "another file").unwrap();
        old.set_path(&other);
        let new = files.reopen(&old, OpenMode::ReadOnly).await.unwrap();
        assert_eq!(new.path(), other);
        assert!(is_free(&other, OpenMode::ReadOnly) && !is_free(&other, OpenMode::ReadWrite));
        assert_eq!(first_bytes(&new).await, pattern(0, 4096));
        assert_eq!(first_bytes(&old).await, pattern(0, 4096));
        let error = old.write_at(at(0), &Segments::zeroed(512), Via::Cached).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error}");
        drop(new);
        assert!(!is_free(&other, OpenMode::ReadWrite), "the old store reads on, under a reader's lock");
        let again = files.reopen(&old, OpenMode::ReadWrite).await.unwrap();
        drop(old);
        assert!(!is_free(&other, OpenMode::ReadOnly));
        again.write_at(at(0), &Segments::zeroed(512), Via::Cached).await.unwrap();
        drop(again);
        assert!(is_free(&other, OpenMode::ReadWrite));
    });
}

fn a_reader_that_is_reopened_for_writing_keeps_everybody_out(engine: &Engine) {
    let (_dir, path, store) = patterned(64 * KIB);
    drop(store);
    engine.run_on(0, move || async move {
        let files = OsFiles::default();
        let old = open(&files, &path, OpenMode::ReadOnly).await;
        let other = open(&files, &path, OpenMode::ReadOnly).await;
        assert_eq!(files.reopen(&old, OpenMode::ReadWrite).await.err().map(|e| e.kind()), Some(ErrorKind::Busy));
        drop(other);
        let new = files.reopen(&old, OpenMode::ReadWrite).await.unwrap();
        new.write_at(at(0), &Segments::zeroed(512), Via::Cached).await.unwrap();
        assert_eq!(first_bytes(&old).await[..512], [0; 512]);
        assert!(!is_free(&path, OpenMode::ReadOnly) && !is_free(&path, OpenMode::ReadWrite));
        for mode in [OpenMode::ReadOnly, OpenMode::ReadWrite] {
            let error = files.reopen(&old, mode).await.err().expect("the old store has no lock to convert");
            assert_eq!(error.kind(), ErrorKind::Busy);
        }
        let error = files.reopen(&new, OpenMode::ReadWrite).await.err().expect("it is open for writing");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        new.write_at(at(0), &Segments::zeroed(512), Via::Cached).await.unwrap();
    });
}

fn a_reader_gets_its_lock_back_from_a_writer_that_is_given_up(engine: &Engine) {
    let (_dir, path, store) = patterned(64 * KIB);
    drop(store);
    engine.run_on(0, move || async move {
        let files = OsFiles::default();
        // From a reader, and from a writer that has become one.
        for mode in [OpenMode::ReadOnly, OpenMode::ReadWrite] {
            let old = open(&files, &path, mode).await;
            if mode == OpenMode::ReadWrite {
                drop(files.reopen(&old, OpenMode::ReadOnly).await.unwrap());
            }
            for _ in 0..2 {
                drop(files.reopen(&old, OpenMode::ReadWrite).await.unwrap());
                assert!(!is_free(&path, OpenMode::ReadWrite) && is_free(&path, OpenMode::ReadOnly));
            }
            // A writer that has become a reader again leaves it a lock, too.
            let new = files.reopen(&old, OpenMode::ReadWrite).await.unwrap();
            let third = files.reopen(&new, OpenMode::ReadOnly).await.unwrap();
            drop((new, third));
            assert!(!is_free(&path, OpenMode::ReadWrite) && is_free(&path, OpenMode::ReadOnly));
            let error = old.write_at(at(0), &Segments::zeroed(512), Via::Cached).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error}");
            drop(old);
            assert!(is_free(&path, OpenMode::ReadWrite));
        }
    });
}

fn a_file_without_locks_gets_none(engine: &Engine) {
    let (_dir, path, store) = patterned(64 * KIB);
    drop(store);
    engine.run_on(0, move || async move {
        let files = OsFiles::default().without_locks(true);
        let old = open(&files, &path, OpenMode::ReadOnly).await;
        let new = files.reopen(&old, OpenMode::ReadWrite).await.unwrap();
        assert!(is_free(&path, OpenMode::ReadWrite));
        new.write_at(at(0), &Segments::zeroed(512), Via::Cached).await.unwrap();
        let read_only = files.reopen(&new, OpenMode::ReadOnly).await.unwrap();
        let error = new.write_at(at(0), &Segments::zeroed(512), Via::Cached).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ReadOnly);
        assert!(read_only.info().read_only);
    });
}

fn a_failed_sync_stays_known(engine: &Engine) {
    let (_dir, path, store) = patterned(64 * KIB);
    drop(store);
    engine.run_on(0, move || async move {
        let files = OsFiles::default();
        let old = open(&files, &path, OpenMode::ReadWrite).await;
        old.recall_failed_sync(5);
        let new = files.reopen(&old, OpenMode::ReadOnly).await.unwrap();
        assert_eq!(new.failed_sync(), Some(5));
    });
}

fn a_second_name_is_the_same_file(engine: &Engine) {
    let dir = folder();
    let [a, b, c] = ["a", "b", "c"].map(|name| dir.path().join(name));
    std::fs::write(&a, "a").unwrap();
    std::fs::write(&c, "c").unwrap();
    engine.run_on(0, move || async move {
        let files = OsFiles::default();
        files.link(&a, &b).await.unwrap();
        let missing = dir.path().join("missing");
        let store = open(&files, &a, OpenMode::ReadOnly).await;
        for (path, is_at) in [(&a, true), (&b, true), (&c, false), (&missing, false)] {
            assert_eq!(files.is_at(&store, path).await.unwrap(), is_at, "{}", path.display());
        }
        let error = files.link(&a, &c).await.unwrap_err();
        assert_eq!((error.kind(), error.path()), (ErrorKind::Exists, Some(c.as_path())));
        std::fs::set_permissions(&a, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
        let other = open(&files, &c, OpenMode::ReadOnly).await;
        files.copy_access(&store, &other).await.unwrap();
        assert_eq!(
            std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&c).unwrap().permissions()) & 0o777,
            0o640
        );
        assert_eq!(files.link(&missing, &dir.path().join("d")).await.unwrap_err().kind(), ErrorKind::NotFound);
    });
}

/// This test once more, as another process that has the file open for reading.
struct Reader(Child);

impl Reader {
    fn start(path: &Path) -> Self {
        let name = std::thread::current().name().unwrap().to_owned();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &name, "--nocapture", "--test-threads", "1"]).env(FILE, path);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("open")), "the other process opens the file");
        Self(child)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn another_process_that_reads_is_in_the_way_of_a_writer() {
    if let Some(path) = std::env::var_os(FILE) {
        let _store = FileStore::open(Path::new(&path), OpenMode::ReadOnly, CacheMode::Page).unwrap();
        std::io::stdout().write_all(b"open\n").unwrap();
        let _ = std::io::stdin().lines().next();
        return;
    }
    let (_dir, path, store) = patterned(64 * KIB);
    drop(store.reopen(OpenMode::ReadOnly, CacheMode::Direct).unwrap());
    let reader = Reader::start(&path);
    assert_eq!(store.reopen(OpenMode::ReadWrite, CacheMode::Direct).err().map(|e| e.kind()), Some(ErrorKind::Busy));
    drop(reader);
    let writer = store.reopen(OpenMode::ReadWrite, CacheMode::Direct).unwrap();
    assert!(!is_free(&path, OpenMode::ReadOnly));
    drop(writer);
}
