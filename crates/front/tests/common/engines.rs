//! For the tests of all fronts: each test runs on both engines.

/// Runs a test on the thread-pool engine, and on io_uring where the kernel has it.
macro_rules! on_both_engines {
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

pub(crate) use on_both_engines;
