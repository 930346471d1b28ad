//! What is left without the right to lock memory: everything, only not registered. Run in a child process, because a
//! limit that was lowered stays so.

mod common;

use std::os::unix::process::CommandExt;
use std::process::Command;

use common::*;
use spile_core::{Segments, Store, Via};
use spile_engine::{Engine, pool};

const INSIDE: &str = "SPILE_TEST_WITHOUT_MEMLOCK";

both_engines!(works_without_locked_memory);

fn works_without_locked_memory(engine: &Engine) {
    let Ok(path) = std::env::var(INSIDE) else { return run_in_child(engine.kind()) };
    let mode = spile_core::OpenMode::ReadOnly;
    let store = spile_engine::FileStore::open(path.as_ref(), mode, spile_engine::CacheMode::Direct);
    let store = store.unwrap();
    engine.run_on(0, move || async move {
        let into = Segments::from(pool().alloc(8192));
        store.read_at(at(4096), &into, Via::Direct).await.unwrap();
        assert_eq!(into.to_vec(), pattern(4096, 8192));
    });
}

fn run_in_child(kind: spile_engine::EngineKind) {
    let (dir, path, store) = patterned(64 * KIB);
    drop(store);
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(dir.path(), open).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", &format!("{kind}::works_without_locked_memory")]).env(INSIDE, &path);
    // SAFETY: only calls that are safe between fork and exec.
    unsafe {
        child.pre_exec(|| {
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const none);
            // Root is not bound by the limit: be nobody, where that can be.
            libc::setgid(65_534);
            libc::setuid(65_534);
            Ok(())
        });
    }
    match child.output() {
        Err(error) => eprintln!("skipped: nobody may not run this program: {error}"),
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout))
        }
    }
}
