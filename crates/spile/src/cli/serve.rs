//! `spile serve`: disks as NBD exports, until a signal.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use spile_core::{Disk, Error, ErrorKind, Result};
use spile_engine::{AnyStore, CacheMode, Config, Engine, EngineKind};
use spile_front_nbd::{Export, Server, ServerConfig, TlsConfig};
use spile_image::{Aligned, Chain, Format, OpenOptions};

use super::{Exit, ParentArgs, complain, parse_cache, parse_format, try_say};
use crate::disks::{self, DiskSpec, Source};
use crate::listen::{self, Bound, Published};
use crate::log;
use crate::notify::notify;
use crate::signals::EndSignals;
use crate::units::{format_size, parse_duration};
use crate::uri::Address;

/// How often and how long apart a busy disk is tried.
const BUSY_ATTEMPTS: u32 = 100;
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// How long clients may take to accept their last replies.
const DRAIN_PATIENCE: Duration = Duration::from_secs(30);

/// Serve disks to NBD clients
///
/// Each DISK is an image file, a block device, null:SIZE (reads zeroes, drops writes) or mem:SIZE (memory). A comma in
/// a path is doubled.
///
/// The first DISK is the default export (the empty name). Each DISK is also exported under its name=N; where that is
/// not given and there are several, under its file's name without the extension.
///
/// A socket appears only when it already answers. Who may connect to a Unix socket is what the umask says. SIGTERM or
/// SIGINT ends the server in order: no new requests, those in flight are answered, the disks are flushed and closed. A
/// second signal ends it at once. Started by systemd's socket activation, it serves on the sockets passed, and --nbd
/// may be left out. It tells systemd READY=1 and STOPPING=1. Requests that failed are told on stderr: the first, and
/// then each time their number has doubled.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// What to serve
    #[arg(required = true, value_name = "DISK[,name=N][,format=F][,read-only]")]
    disks: Vec<DiskSpec>,
    /// Where to listen (may be given several times)
    #[arg(long, value_name = "unix:PATH|tcp:HOST:PORT")]
    nbd: Vec<Address>,
    /// The way to the disks' bytes: past the page cache (O_DIRECT) or through it
    #[arg(long, value_name = "direct|page", value_parser = parse_cache, default_value = "direct")]
    cache: CacheMode,
    /// How I/O is done: auto takes io_uring where the kernel has and allows it
    #[arg(long, value_name = "auto|uring|threads", value_parser = parse_engine, default_value = "auto")]
    engine: EngineKind,
    /// Worker threads (as many as processors, at most 4, unless given)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: Option<u16>,
    /// The format of every DISK that has no format=F, instead of what its extension says
    #[arg(long, value_name = "raw|vhd", value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    parents: ParentArgs,
    /// The server's certificate chain (PEM): clients may use TLS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Clients must show a certificate signed by one of these authorities (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
    /// Serve nobody without TLS
    #[arg(long, requires = "tls_cert")]
    tls_required: bool,
    /// Hang up on clients that have not chosen an export after this long
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10s")]
    handshake_timeout: Duration,
}

fn parse_engine(text: &str) -> Result<EngineKind, String> {
    text.parse().map_err(|error: Error| error.to_string())
}

type ServedDisk = Aligned<Chain<AnyStore>>;

/// One DISK, open.
struct Open {
    disk: Arc<ServedDisk>,
    /// Its exports' names.
    names: Vec<String>,
    label: String,
    kind: String,
    read_only: bool,
}

/// Runs `spile serve`.
///
/// # Errors
/// When a disk cannot be opened or closed, or an address cannot be listened on.
pub fn run(args: &ServeArgs) -> Result<Exit> {
    log::to_stderr();
    let signals = EndSignals::block()?;
    let bound = bind(args)?;
    let mut config = Config { kind: args.engine, ..Config::default() };
    config.workers = args.workers.map_or(config.workers, usize::from);
    let engine = Engine::start(config)?;
    let mut disks = Vec::new();
    let served = open_disks(args, &engine, &mut disks).and_then(|()| serve(args, &engine, &disks, bound, signals));
    // Also after a failure: what is open is to be left as other programs expect it.
    let closed = close(&engine, disks, served);
    engine.shutdown();
    closed.map(|()| Exit::Ok)
}

/// Serves until a signal comes, and then until what is in flight is answered.
fn serve(args: &ServeArgs, engine: &Engine, disks: &[Open], bound: Vec<Bound>, signals: EndSignals) -> Result<()> {
    let server = Server::new(engine.clone(), server_config(args), exports(disks))?;
    let lines = describe(args, disks, &bound);
    let served = listen(&server, bound).and_then(|published| {
        let ended = until_signal(&lines, signals);
        server.stop();
        // Nobody answers there any more, and a second signal shall leave no name behind.
        drop(published);
        ended
    });
    server.stop();
    if !server.wait_drained(DRAIN_PATIENCE) {
        complain("hung up on clients that did not take their replies");
    }
    served
}

fn until_signal(lines: &[String], signals: EndSignals) -> Result<()> {
    // Guests need their disks also when nobody reads this.
    lines.iter().for_each(|line| drop(try_say(line)));
    notify("READY=1");
    signals.wait()?;
    notify("STOPPING=1");
    signals.exit_on_next();
    Ok(())
}

fn bind(args: &ServeArgs) -> Result<Vec<Bound>> {
    let mut bound = listen::from_systemd()?;
    for address in &args.nbd {
        bound.push(Bound::new(address)?);
    }
    if bound.is_empty() {
        return Err(Error::new(ErrorKind::InvalidInput, "there is nowhere to listen")
            .hint("say --nbd unix:PATH or --nbd tcp:HOST:PORT"));
    }
    Ok(bound)
}

fn server_config(args: &ServeArgs) -> ServerConfig {
    let files = args.tls_cert.clone().zip(args.tls_key.clone());
    let tls = files.map(|(cert_chain_pem, key_pem)| TlsConfig {
        cert_chain_pem,
        key_pem,
        client_ca_pem: args.tls_ca.clone(),
        required: args.tls_required,
    });
    ServerConfig { handshake_timeout: args.handshake_timeout, tls, ..ServerConfig::default() }
}

/// Opens the disks; those that were opened before one failed are in `disks`.
fn open_disks(args: &ServeArgs, engine: &Engine, disks: &mut Vec<Open>) -> Result<()> {
    let names = export_names(&args.disks);
    for (spec, names) in args.disks.iter().zip(names) {
        let options = OpenOptions {
            format: spec.format.or(args.format),
            read_only: spec.read_only,
            allow_parents: args.parents.allow_parents.clone(),
            ..OpenOptions::default()
        };
        let chain = open_patiently(engine, args.cache, &spec.source, &options)?;
        let kind = disks::describe(&chain);
        disks.push(Open {
            disk: Arc::new(Aligned::new(chain)),
            names,
            label: spec.source.label(),
            kind,
            read_only: spec.read_only,
        });
    }
    Ok(())
}

/// Opens a disk; one that is busy is tried for some time. A server that was just killed is the reason: the kernel keeps
/// its files open, and their locks, for as long as it takes to wind up its io_uring.
fn open_patiently(
    engine: &Engine,
    cache: CacheMode,
    source: &Source,
    options: &OpenOptions,
) -> Result<Chain<AnyStore>> {
    let open = || {
        let (source, options) = (source.clone(), options.clone());
        engine.run_on(0, move || async move { disks::open(cache, &source, &options).await })
    };
    for _ in 0..BUSY_ATTEMPTS {
        match open() {
            Err(error) if error.kind() == ErrorKind::Busy => std::thread::sleep(BUSY_PAUSE),
            result => return result,
        }
    }
    open()
}

/// Each disk's export names, by the rule in the command's help.
fn export_names(disks: &[DiskSpec]) -> Vec<Vec<String>> {
    let several = disks.len() > 1;
    let names = disks.iter().enumerate().map(|(number, spec)| {
        let own = spec.name.clone().or_else(|| several.then(|| spec.source.stem()));
        let default = (number == 0).then(String::new);
        let mut names: Vec<String> = default.into_iter().chain(own).collect();
        names.dedup();
        names
    });
    names.collect()
}

fn exports(disks: &[Open]) -> Vec<Export<ServedDisk>> {
    let each = |open: &Open| {
        let (disk, read_only) = (open.disk.clone(), open.read_only);
        let description = open.label.clone();
        open.names.clone().into_iter().map(move |name| Export {
            name,
            description: description.clone(),
            disk: disk.clone(),
            read_only,
        })
    };
    disks.iter().flat_map(each).collect()
}

/// One line for each export and address.
fn describe(args: &ServeArgs, disks: &[Open], bound: &[Bound]) -> Vec<String> {
    let mut lines = Vec::new();
    for open in disks {
        let size = format_size(open.disk.info().size_bytes);
        let read_only = if open.read_only { ", read-only" } else { "" };
        let what = format!("serving {} ({size} {}{read_only})", open.label, open.kind);
        for name in &open.names {
            for socket in bound {
                let mut line = what.clone();
                // Writing to a string cannot fail.
                let _ = match socket.uri(name, args.tls_required) {
                    Some(uri) => write!(line, " as {uri}"),
                    None => write!(line, " as export `{name}` on a socket passed to us"),
                };
                lines.push(line);
            }
        }
    }
    lines
}

fn listen(server: &Server<ServedDisk>, bound: Vec<Bound>) -> Result<Vec<Published>> {
    let mut published = Vec::new();
    for socket in bound {
        let (fd, name) = socket.publish()?;
        server.listen(fd)?;
        published.extend(name);
    }
    Ok(published)
}

/// Closes the disks, each whatever became of the others. The first error, `result`'s before all, is returned; the
/// others are told at once.
fn close(engine: &Engine, disks: Vec<Open>, mut result: Result<()>) -> Result<()> {
    for open in disks {
        let disk = open.disk;
        let closed = engine.run_on(0, move || async move { disk.close().await });
        match (&result, closed) {
            (Ok(()), closed) => result = closed,
            (Err(_), Err(another)) => complain(another),
            (Err(_), Ok(())) => {}
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(disks: &[&str]) -> Vec<Vec<String>> {
        export_names(&disks.iter().map(|disk| disk.parse().unwrap()).collect::<Vec<_>>())
    }

    #[test]
    fn the_first_disk_is_the_default_export() {
        assert_eq!(names(&["a.vhd"]), [[""]]);
        assert_eq!(names(&["a.vhd,name=x"]), [["", "x"]]);
        assert_eq!(names(&["a.vhd,name="]), [[""]]);
        assert_eq!(names(&["a.vhd", "b.raw,name=y"]), [vec!["", "a"], vec!["y"]]);
    }
}
