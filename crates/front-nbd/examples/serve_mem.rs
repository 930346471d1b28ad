//! A little NBD server for trying clients and measuring: one disk in memory, or over a file.
//!
//!     serve_mem SOCKET [SIZE_MIB] [--engine auto|uring|aio|threads] [--workers N] [--file PATH] [--read-only]
//!               [--cert PEM --key PEM [--client-ca PEM] [--tls-required]]
//!
//! It serves until its standard input ends, then prints what it counted.

#[path = "../tests/it/disk.rs"]
mod disk;

use std::error::Error;
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use disk::StoreDisk;
use spile_core::metrics::{Op, Reading};
use spile_core::{Files, OpenMode, Store};
use spile_engine::{Config, Engine};
use spile_front_nbd::{Export, Server, ServerConfig, TlsFiles};
use spile_store::{AnyStore, CacheMode, MemStore, OsFiles};

struct Arguments {
    list: Vec<String>,
}

impl Arguments {
    fn value(&mut self, name: &str) -> Option<String> {
        let at = self.list.iter().position(|argument| argument == name)?;
        self.list.remove(at);
        (at < self.list.len()).then(|| self.list.remove(at))
    }

    fn flag(&mut self, name: &str) -> bool {
        let at = self.list.iter().position(|argument| argument == name);
        at.map(|at| self.list.remove(at)).is_some()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = Arguments { list: std::env::args().skip(1).collect() };
    let mut config = Config::default();
    if let Some(kind) = arguments.value("--engine") {
        config.kind = kind.parse()?;
    }
    if let Some(workers) = arguments.value("--workers") {
        config.workers = workers.parse()?;
    }
    let file = arguments.value("--file");
    let read_only = arguments.flag("--read-only");
    let tls = tls(&mut arguments);
    let socket = arguments.list.first().ok_or("give the path of a socket")?.clone();
    let size_mib: u64 = arguments.list.get(1).map_or(Ok(1024), |text| text.parse())?;
    let engine = Engine::start(config)?;
    let config = ServerConfig { tls, ..ServerConfig::default() };
    let path = Path::new(&socket);
    let result = match file {
        Some(file) => {
            let files = OsFiles::new(CacheMode::Direct);
            let store: AnyStore = engine
                .run_on(0, move || async move { files.open(&Path::new(&file).into(), OpenMode::ReadWrite).await })?;
            serve(&engine, store, path, config, read_only)
        }
        None => serve(&engine, MemStore::new(size_mib << 20), path, config, read_only),
    };
    engine.shutdown();
    result
}

fn tls(arguments: &mut Arguments) -> Option<TlsFiles> {
    let client_ca_pem = arguments.value("--client-ca").map(PathBuf::from);
    let required = arguments.flag("--tls-required");
    let (cert, key) = (arguments.value("--cert")?, arguments.value("--key")?);
    Some(TlsFiles { cert_chain_pem: cert.into(), key_pem: key.into(), client_ca_pem, required })
}

fn serve<S: Store>(
    engine: &Engine,
    store: S,
    path: &Path,
    config: ServerConfig,
    read_only: bool,
) -> Result<(), Box<dyn Error>> {
    let disk = Arc::new(StoreDisk::new(store));
    let description = "the example's disk".to_owned();
    let export = Export {
        name: String::new(),
        description,
        disk_name: "mem".to_owned(),
        disk,
        read_only,
        checkpoints: None,
        kept: |_| None,
        withdrawn: Arc::default(),
    };
    let server = Server::new(engine.clone(), config, vec![export])?;
    server.listen(UnixListener::bind(path)?.into())?;
    println!("serving on {} with the {} engine", path.display(), engine.kind());
    let before = server.metrics("").requests;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    server.stop();
    server.wait_drained(Duration::from_secs(5));
    report(&before, &server.metrics("").requests);
    std::fs::remove_file(path)?;
    Ok(())
}

fn report(before: &Reading, now: &Reading) {
    for kind in Op::ALL {
        let op = now.op(kind);
        if op.ended > 0 {
            let quantile_us = |q| op.latency.quantile_ns(q) as f64 / 1e3;
            println!(
                "{:>12}: {} done, {} failed, {} bytes, p50 {:.1} us, p99 {:.1} us",
                kind.name(),
                op.ended - op.errors,
                op.errors,
                op.bytes,
                quantile_us(0.5),
                quantile_us(0.99)
            );
        }
    }
    println!("average depth {:.3}", now.average_depth_since(before));
}
