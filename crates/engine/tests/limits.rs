//! What is left without the right to lock memory (everything, only not registered) and without io_uring (the other
//! reactor). Run in child processes, because a right that was given up stays so.

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
    let store = spile_store::FileStore::open(path.as_ref(), mode, spile_store::CacheMode::Direct);
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
        Err(error) => println!("SKIP without locked memory: nobody may not run this program: {error}"),
        Ok(output) => assert_passed(&output),
    }
}

/// The child has run its one test, and not none.
fn assert_passed(output: &std::process::Output) {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

const FORBIDDEN: &str = "SPILE_TEST_URING_FORBIDDEN_WITH";

/// Makes the system call `number` fail with `errno` in this process and all it starts.
fn forbid(number: libc::c_long, errno: u32) -> std::io::Result<()> {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, number as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its steps are live during the call, which copies them.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[test]
fn where_io_uring_is_forbidden_threads_serve() {
    use spile_engine::{Config, EngineKind};
    if std::env::var_os(FORBIDDEN).is_some() {
        let start = |kind| Engine::start(Config { kind, ..Config::default() });
        let error = start(EngineKind::Uring).err().expect("io_uring is forbidden");
        assert!(error.hint_text().is_some_and(|hint| hint.contains("--engine threads")), "{error}");
        let engine = start(EngineKind::Auto).unwrap();
        assert_eq!(engine.kind(), EngineKind::Threads);
        return engine.shutdown();
    }
    // The last one lets a ring be made, but not used.
    let ways = [
        (libc::SYS_io_uring_setup, libc::EPERM),
        (libc::SYS_io_uring_setup, libc::ENOSYS),
        (libc::SYS_io_uring_enter, libc::EPERM),
    ];
    for (number, errno) in ways {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "where_io_uring_is_forbidden_threads_serve"]).env(FORBIDDEN, "1");
        // SAFETY: only system calls between fork and exec.
        unsafe { child.pre_exec(move || forbid(number, errno as u32)) };
        match child.output() {
            Err(error) => println!("SKIP io_uring forbidden: no seccomp here: {error}"),
            Ok(output) => assert_passed(&output),
        }
    }
}
