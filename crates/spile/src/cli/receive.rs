//! `spile receive`: takes in disks that other hosts move here.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use spile_core::{Error, ErrorKind, Result};
use spile_engine::{Config, EngineKind};
use spile_front_nbd::{ServerConfig, TlsFiles};
use spile_server::receiving::{self, Settings};
use spile_store::CacheMode;
use utoipa::ToSchema;

use super::{Exit, on_engine, parse_cache, parse_engine, print_json, say, try_say};
use crate::listen::{SocketAccess, parse_group, parse_mode};
use crate::log;
use crate::panics::abort_on_panic;
use crate::signals::ServerSignals;
use crate::units::format_size;
use crate::uri::Address;

/// Take in disks that other hosts move here
///
/// `spile move DISK --to nbds://THIS-HOST/NAME` on the other host needs nothing else here: the image DIR/NAME is made with the disk's size, in the format
/// that the extension of NAME says. Until the disk is handed over, it is half made under a hidden name, and nobody can take it for the disk. Then it is
/// DIR/NAME, and the other host's guest goes on with it through this process; once the other host has let go of it, a server of this host can be
/// started with it. Nothing that is there is overwritten, and nothing outside of DIR is touched.
///
/// With `--chain keep` there, the disk's parents come first, each as a file of its own. One that has come before is used again when it is the same. Nobody writes to a
/// parent that has come here; `spile delete` says that no disk needs it any more.
///
/// Whoever may connect may put disks into DIR, and read and write those that were moved there. So a TCP address needs TLS with certificates of both
/// sides (--tls-cert, --tls-key, --tls-ca); --insecure does without. SIGTERM or SIGINT ends it in order; moves that are under way wait
/// for the next one.
#[derive(Debug, Args)]
pub struct ReceiveArgs {
    /// The folder for the disks
    folder: PathBuf,
    /// Take disks in here (may be given several times)
    #[arg(long, value_name = "unix:PATH|tcp:HOST:PORT", required_unless_present_any = ["list", "remove"])]
    nbd: Vec<Address>,
    /// This host's certificate chain (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// The other hosts must show a certificate signed by one of these authorities (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
    /// Listen on a TCP address although everybody who reaches it may read and write the disks that are moved here
    #[arg(long)]
    insecure: bool,
    /// The permissions of the Unix sockets, in octal; who may connect needs to write [default: as the umask says]
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    socket_mode: Option<u32>,
    /// The group of these sockets, by name or number
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    socket_group: Option<u32>,
    /// The way to the disks' bytes: past the page cache (O_DIRECT) or through it
    #[arg(long, value_name = "direct|page", value_parser = parse_cache, default_value = "direct")]
    cache: CacheMode,
    /// How I/O is done: auto takes io_uring where the kernel has and allows it, else Linux AIO, else helper threads
    #[arg(long, value_name = "auto|uring|aio|threads", value_parser = parse_engine, default_value = "auto")]
    engine: EngineKind,
    /// List the disks that have come to DIR, and their parents, or are half there
    #[arg(long, conflicts_with_all = ["nbd", "remove"])]
    list: bool,
    /// Remove the half of the disk NAME, or of a parent, that a move which is given up has left in DIR
    #[arg(long, value_name = "NAME", conflicts_with = "nbd")]
    remove: Option<String>,
    /// With --remove: also a half that may be the disk (`handing-over`). Look first that the disk is at its old path on the other host
    #[arg(long, requires = "remove")]
    force: bool,
    /// Print JSON
    #[arg(long, requires = "list")]
    json: bool,
}

/// The disks of a folder.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReceivedDisks {
    /// The disks, by name.
    disks: Vec<ReceivedDisk>,
}

/// A disk that was moved to this host, or is being moved.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReceivedDisk {
    /// Its name.
    name: String,
    /// `whole`: it was handed over. `handing-over`: it may be the disk already, and only its old host knows. `half`: it is being moved, or the move was given
    /// up. `making`: its image was about to be made.
    state: String,
    /// Its size in bytes.
    virtual_size_bytes: u64,
    /// Its image's format.
    format: String,
    /// False when its file is not there any more.
    is_there: bool,
    /// It is a parent of a disk that was moved here with its chain, or is being moved.
    is_parent: bool,
}

/// Runs `spile receive`.
///
/// # Errors
/// When the folder cannot be found, an address cannot be listened on, or a half cannot be removed.
pub fn run(args: &ReceiveArgs) -> Result<Exit> {
    if args.list {
        return list(args);
    }
    if let Some(name) = args.remove.clone() {
        let (folder, force) = (args.folder.clone(), args.force);
        on_engine(move || async move { receiving::remove_half(&folder, &name, force).await })?;
        return Ok(Exit::Ok);
    }
    let tls = tls(args)?;
    log::to_stderr();
    abort_on_panic();
    let signals = ServerSignals::block()?;
    let engine = Config { kind: args.engine, ..Config::default() };
    let settings = Settings {
        folder: args.folder.clone(),
        addresses: args.nbd.clone(),
        nbd: ServerConfig { tls, ..ServerConfig::default() },
        access: SocketAccess { mode: args.socket_mode, group: args.socket_group },
        engine,
        cache: args.cache,
    };
    receiving::receive(&settings, signals, |line| drop(try_say(line))).map(|()| Exit::Ok)
}

/// How clients use TLS. On a network without it, everybody could do everything.
fn tls(args: &ReceiveArgs) -> Result<Option<TlsFiles>> {
    let files = args.tls_cert.clone().zip(args.tls_key.clone());
    let tls = files.map(|(cert_chain_pem, key_pem)| TlsFiles {
        cert_chain_pem,
        key_pem,
        client_ca_pem: args.tls_ca.clone(),
        required: true,
    });
    let is_safe = tls.as_ref().is_some_and(|tls| tls.client_ca_pem.is_some());
    match args.nbd.iter().find(|address| matches!(address, Address::Tcp(..))) {
        Some(address) if !is_safe && !args.insecure => {
            let what = format!("everybody who reaches {address} could read and write the disks that are moved here");
            let hint = "say --tls-cert, --tls-key and --tls-ca, so that both hosts show certificates; or --insecure, on a network of your own";
            Err(Error::new(ErrorKind::InvalidInput, what).hint(hint))
        }
        _ => Ok(tls),
    }
}

fn list(args: &ReceiveArgs) -> Result<Exit> {
    let folder = args.folder.clone();
    let known = on_engine(move || async move { receiving::list(&folder).await })?;
    let disks = known.into_iter().map(|known| ReceivedDisk {
        name: known.name,
        state: known.note.state.name().to_owned(),
        virtual_size_bytes: known.note.size_bytes,
        format: known.note.format.to_string(),
        is_there: known.is_there,
        is_parent: known.note.is_parent,
    });
    let disks: Vec<ReceivedDisk> = disks.collect();
    if args.json {
        return print_json(&ReceivedDisks { disks }).map(|()| Exit::Ok);
    }
    for disk in &disks {
        let gone = if disk.is_there { "" } else { ", and its file is gone" };
        let size = format_size(disk.virtual_size_bytes);
        let parent = if disk.is_parent { ", a parent" } else { "" };
        say(format_args!("{}: {size}, {}, {}{parent}{gone}", disk.name, disk.format, disk.state));
    }
    Ok(Exit::Ok)
}
