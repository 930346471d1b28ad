//! For the tests of all fronts: each test runs on each engine.

use spile_engine::{Config, Engine, EngineKind};

/// Runs a test on the thread-pool engine, on Linux AIO where the kernel has it, and on io_uring where the kernel has that.
macro_rules! on_each_engine {
    ($($(#[$attr:meta])* fn $name:ident($kind:ident) $body:block)*) => {
        $(
            mod $name {
                use super::*;
                fn run($kind: spile_engine::EngineKind) $body
                #[test]
                $(#[$attr])*
                fn threads() {
                    run(spile_engine::EngineKind::Threads);
                }
                #[test]
                $(#[$attr])*
                fn aio() {
                    run_on_aio(run);
                }
                /// `Auto` is io_uring where the kernel allows it.
                #[test]
                $(#[$attr])*
                fn auto() {
                    run(spile_engine::EngineKind::Auto);
                }
            }
        )*
    };
}

pub(crate) use on_each_engine;

/// Runs a test on Linux AIO, where the kernel has it.
pub(crate) fn run_on_aio(test: fn(EngineKind)) {
    match Engine::start(Config { kind: EngineKind::Aio, workers: 1, ..Config::default() }) {
        Ok(engine) => engine.shutdown(),
        Err(error) => return println!("SKIP aio: {error}"),
    }
    test(EngineKind::Aio);
}
