//! What is left without the right to lock memory (everything, only not registered) and without io_uring or AIO (the other
//! engines). Run in child processes, because a right that was given up stays so.

mod common;

use std::future::Future;
use std::os::unix::process::CommandExt;
use std::process::Command;

use common::*;
use spile_core::{Result, Segments, Store, Via};
use spile_engine::{Config, Engine, EngineKind, Event, pool};

const INSIDE: &str = "SPILE_TEST_WITHOUT_MEMLOCK";

each_engine!(works_without_locked_memory);

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

fn run_in_child(kind: EngineKind) {
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

const FORBIDDEN: &str = "SPILE_TEST_FORBIDDEN";

/// A filter that makes system calls fail with the errno behind each.
fn filter(calls: &[(libc::c_long, i32)]) -> Vec<libc::sock_filter> {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for &(number, errno) in calls {
        filter.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, number as u32));
        filter.push(step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32));
    }
    filter.push(step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW));
    filter
}

/// Puts this process, and all that it starts, under a filter.
fn obey(filter: &mut [libc::sock_filter]) -> std::io::Result<()> {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its steps are live during the call, which copies them.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Looks at the engines in a process in which io_uring is forbidden, and AIO with it when `serves` is Threads.
fn look_at_engines(serves: EngineKind) {
    let start = |kind| Engine::start(Config { kind, ..Config::default() });
    for kind in EngineKind::ALL.into_iter().take_while(|kind| *kind != serves) {
        let error = start(kind).err().expect("it is forbidden");
        assert!(error.hint_text().is_some_and(|hint| hint.ends_with("or use --engine auto")), "{error}");
    }
    let engine = start(EngineKind::Auto).unwrap();
    assert_eq!(engine.kind(), serves);
    let about = engine.about();
    assert!(about.starts_with(&format!("engine {serves} ")) && !about.contains("--engine"), "{about}");
    assert!(about.contains("io_uring cannot be used here: "), "{about}");
    assert_eq!(about.contains("Linux AIO cannot be used here: "), serves == EngineKind::Threads, "{about}");
    assert!(about.contains("seccomp"), "it says what to do: {about}");
    engine.shutdown();
}

#[test]
fn where_engines_are_forbidden_the_next_one_serves() {
    if let Some(serves) = std::env::var_os(FORBIDDEN) {
        return look_at_engines(serves.to_str().unwrap().parse().unwrap());
    }
    if let Err(error) = Engine::start(Config { kind: EngineKind::Aio, ..Config::default() }) {
        return println!("SKIP engines forbidden: {error}");
    }
    let setup = libc::SYS_io_uring_setup;
    let ways = [
        ("aio", vec![(setup, libc::EPERM)]),
        ("aio", vec![(setup, libc::ENOSYS)]),
        // A ring can be made, but not used.
        ("aio", vec![(libc::SYS_io_uring_enter, libc::EPERM)]),
        ("threads", vec![(setup, libc::ENOSYS), (libc::SYS_io_setup, libc::ENOSYS)]),
        ("threads", vec![(setup, libc::EPERM), (libc::SYS_io_setup, libc::EPERM)]),
    ];
    for (serves, calls) in ways {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "where_engines_are_forbidden_the_next_one_serves"]).env(FORBIDDEN, serves);
        let mut filter = filter(&calls);
        // SAFETY: only system calls between fork and exec.
        unsafe { child.pre_exec(move || obey(&mut filter)) };
        match child.output() {
            Err(error) => println!("SKIP engines forbidden: no seccomp here: {error}"),
            Ok(output) => assert_passed(&output),
        }
    }
}

const OLD_KERNEL: &str = "SPILE_TEST_OLD_KERNEL";

/// Before Linux 5.8 an eventfd cannot be read with RWF_NOWAIT. A worker that read it otherwise would wait for a peer that empties it.
#[test]
fn an_event_is_not_read_where_no_read_of_it_can_be_told_not_to_wait() {
    if std::env::var_os(OLD_KERNEL).is_some() {
        return ["threads", "aio"].iter().for_each(|kind| take_events(kind.parse().unwrap()));
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "an_event_is_not_read_where_no_read_of_it_can_be_told_not_to_wait"]).env(OLD_KERNEL, "1");
    let mut filter = filter(&[(libc::SYS_preadv2, libc::EOPNOTSUPP)]);
    // SAFETY: only system calls between fork and exec.
    unsafe { child.pre_exec(move || obey(&mut filter)) };
    match child.output() {
        Err(error) => println!("SKIP old eventfds: no seccomp here: {error}"),
        Ok(output) => assert_passed(&output),
    }
}

fn take_events(kind: EngineKind) {
    let Ok(engine) = Engine::start(Config { kind, workers: 1, ..Config::default() }) else {
        return println!("SKIP old eventfds: no engine {kind}");
    };
    engine.run_on(0, || async {
        let peer = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        let event = Event::from_fd(peer.try_clone().unwrap()).unwrap();
        let is_over = async |wait: &mut std::pin::Pin<&mut dyn Future<Output = Result<()>>>| {
            // Long enough for the worker to look at its sockets.
            spile_engine::sleep(std::time::Duration::from_millis(20)).await;
            let once = &mut std::task::Context::from_waker(std::task::Waker::noop());
            wait.as_mut().poll(once).is_ready()
        };
        // Rung before each wait, for the first time before anybody knew it.
        for _ in 0..3 {
            event.ring();
            event.wait().await.unwrap();
        }
        {
            let mut wait: std::pin::Pin<&mut dyn Future<Output = Result<()>>> = std::pin::pin!(event.wait());
            assert!(!is_over(&mut wait).await, "it was not rung since");
            event.ring();
            assert!(is_over(&mut wait).await, "it was rung while somebody waited");
        }
        let mut count = [0; 8];
        rustix::io::read(&peer, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 4, "somebody has read it");
        // It is empty now, as by a peer that wants the worker to wait; that has no effect.
        event.ring();
        event.wait().await.unwrap();
    });
    engine.shutdown();
}
