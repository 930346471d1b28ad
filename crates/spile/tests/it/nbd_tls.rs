//! Our NBD client with TLS, against our server.

use std::path::Path;
use std::time::Duration;

use crate::common::control::ask;
use crate::common::nbd::Client;
use crate::common::{Served, fails, json, ok};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use spile::uri::{NbdUri, TlsQuery};
use spile_core::{Error, ErrorKind};
use spile_store::NbdOptions;

/// A folder with an authority, and certificates that it signed for a server and a client of this host name, by the file names
/// of libnbd and QEMU.
fn certificates(folder: &Path, host: &str) {
    std::fs::create_dir(folder).unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    std::fs::write(folder.join("ca-cert.pem"), authority.pem()).unwrap();
    for role in ["server", "client"] {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &authority).unwrap();
        std::fs::write(folder.join(format!("{role}-cert.pem")), certificate.pem()).unwrap();
        std::fs::write(folder.join(format!("{role}-key.pem")), key.serialize_pem()).unwrap();
    }
}

const IDENTITY: [&str; 5] = ["--tls-cert", "own/server-cert.pem", "--tls-key", "own/server-key.pem", "--tls-required"];

fn uri(served: &Served, folder: &Path, host: Option<&str>) -> NbdUri {
    let tls = TlsQuery { certificates: Some(folder.to_owned()), hostname: host.map(str::to_owned), psk_file: None };
    NbdUri { tls: Some(tls), ..served.uri() }
}

/// The error of a connection that is refused: its kind, and that its hint says what to do.
fn refused(uri: &NbdUri, kind: ErrorKind, what: &str, hint: &str) {
    let error: Error = Client::connect(uri).map(drop).unwrap_err();
    let said = error.to_string();
    assert!(error.kind() == kind && said.contains(what) && said.contains(hint), "{:?}: {said}", error.kind());
}

#[test]
fn a_disk_is_used_through_tls() {
    let dir = tempfile::tempdir().unwrap();
    certificates(&dir.path().join("own"), "localhost");
    let served = Served::start(dir.path(), &[&["mem:64M"], &IDENTITY[..]].concat());
    let uri = uri(&served, &dir.path().join("own"), None);
    let client = Client::connect(&uri).unwrap();
    let data: Vec<u8> = (0..3_000_000u32).map(|n| (n * 7) as u8).collect();
    client.write(4096, &data, false).unwrap();
    client.flush().unwrap();
    let mut back = vec![0; data.len()];
    client.read(4096, &mut back).unwrap();
    assert!(back == data);
    drop(client);
    // The same by the program, with many requests in flight on two connections.
    let uri = uri.to_string();
    ok(dir.path(), &["load", &uri, "--rw", "randrw", "--ios", "1000", "--verify", "--connections", "2"]);
    assert!(served.terminate().success());
}

#[test]
fn what_is_wrong_with_tls_is_named_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let (own, other) = (dir.path().join("own"), dir.path().join("other"));
    certificates(&own, "localhost");
    certificates(&other, "localhost");
    let served = Served::start(dir.path(), &[&["mem:1M"], &IDENTITY[..]].concat());
    refused(&served.uri(), ErrorKind::Denied, "asks for TLS", "nbds+unix://");
    refused(&uri(&served, &other, None), ErrorKind::Denied, "no authority", "tls-certificates=DIR");
    refused(&uri(&served, &own, Some("example.org")), ErrorKind::Denied, "another host", "tls-hostname=NAME");
    refused(&uri(&served, &own, Some("not a host")), ErrorKind::InvalidInput, "no host name", "tls-hostname=NAME");
    refused(&uri(&served, &dir.path().join("none"), None), ErrorKind::NotFound, "ca-cert.pem", "");
    let psk = TlsQuery { psk_file: Some("/keys".into()), ..TlsQuery::default() };
    let psk = NbdUri { tls: Some(psk), ..served.uri() };
    refused(&psk, ErrorKind::Unsupported, "pre-shared keys", "tls-certificates=DIR");
    assert!(served.terminate().success());
    let plain = Served::start(dir.path(), &["mem:1M"]);
    refused(&uri(&plain, &own, None), ErrorKind::Denied, "does not offer TLS", "network that you trust");
}

#[test]
fn a_server_may_ask_who_the_client_is() {
    let dir = tempfile::tempdir().unwrap();
    let (own, other) = (dir.path().join("own"), dir.path().join("other"));
    certificates(&own, "localhost");
    certificates(&other, "localhost");
    // It believes the server, and has a certificate that the server does not believe.
    std::fs::copy(own.join("ca-cert.pem"), other.join("ca-cert.pem")).unwrap();
    let anonymous = dir.path().join("anonymous");
    std::fs::create_dir(&anonymous).unwrap();
    std::fs::copy(own.join("ca-cert.pem"), anonymous.join("ca-cert.pem")).unwrap();
    let args = [&["mem:1M"], &IDENTITY[..], &["--tls-ca", "own/ca-cert.pem"]].concat();
    let served = Served::start(dir.path(), &args);
    Client::connect(&uri(&served, &own, None)).unwrap().read(0, &mut [0; 512]).unwrap();
    for folder in [&other, &anonymous] {
        refused(&uri(&served, folder, None), ErrorKind::Denied, "refuses the connection", "client-cert.pem");
    }
    assert!(served.terminate().success());
    // Nobody gets around that by asking for no TLS.
    let args = [&["mem:1M"], &IDENTITY[..4], &["--tls-ca", "own/ca-cert.pem"]].concat();
    let served = Served::start(dir.path(), &args);
    refused(&served.uri(), ErrorKind::Denied, "asks for TLS", "nbds+unix://");
    Client::connect(&uri(&served, &own, None)).unwrap().read(0, &mut [0; 512]).unwrap();
    assert!(served.terminate().success());
}

#[test]
fn certificates_that_are_just_being_exchanged_fail_no_request() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let own = dir.join("own");
    certificates(&own, "localhost");
    std::fs::write(dir.join("d.raw"), vec![0; 1 << 20]).unwrap();
    let args = [&["d.raw"], &IDENTITY[..], &["--tls-ca", "own/ca-cert.pem"]].concat();
    let served = Served::start(dir, &args);
    let uri = uri(&served, &own, None);
    let client = Client::connect_with(&uri, NbdOptions::default(), 1).unwrap();
    client.write(0, &[7; 4096], true).unwrap();
    served.kill();
    let (key, away) = (own.join("client-key.pem"), dir.join("away"));
    std::fs::rename(&key, &away).unwrap();
    let served = Served::start(dir, &args);
    let writing = std::thread::spawn(move || client.write(4096, &[8; 4096], true));
    std::thread::sleep(Duration::from_millis(500));
    std::fs::write(&key, "half of a k").unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert!(!writing.is_finished(), "{:?}", writing.join());
    std::fs::rename(&away, &key).unwrap();
    writing.join().unwrap().unwrap();
    assert!(served.terminate().success());
}

#[test]
fn a_socket_that_could_not_be_removed_is_there_to_be_removed_again() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    certificates(&dir.join("own"), "localhost");
    let more = ["--nbd", "unix:more.sock", "--control", "c"];
    let served = Served::start(dir, &[&["mem:1M"], &IDENTITY[..], &more].concat());
    let path = format!("/v1/exports/unix:{}", dir.join("more.sock").display().to_string().replace('/', "%2F"));
    let (key, away) = (dir.join("own/server-key.pem"), dir.join("away"));
    std::fs::rename(&key, &away).unwrap();
    let (status, said) = ask(&dir.join("c"), "DELETE", &path, "");
    assert!(status >= 400 && said.to_string().contains("server-key.pem"), "{said}");
    let exports = || ask(&dir.join("c"), "GET", "/v1/disks", "").1["disks"][0]["exports"].to_string();
    assert!(exports().contains("more.sock") && dir.join("more.sock").exists());
    std::fs::rename(&away, &key).unwrap();
    let (status, said) = ask(&dir.join("c"), "DELETE", &path, "");
    assert_eq!(status, 200, "{said}");
    assert!(!exports().contains("more.sock") && !dir.join("more.sock").exists());
    assert!(served.terminate().success());
}

#[test]
fn a_disk_that_is_in_use_is_named_with_tls() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    certificates(&dir.join("own"), "localhost");
    std::fs::write(dir.join("tls-of-this-test.raw"), [0; 4096]).unwrap();
    let served = Served::start(dir, &[&["tls-of-this-test.raw"], &IDENTITY[..]].concat());
    let exports = json(dir, &["ls"])["disks"]
        .as_array()
        .unwrap()
        .iter()
        .find_map(|disk| (disk["name"] == "tls-of-this-test").then(|| disk["exports"].clone()));
    assert_eq!(exports.unwrap()[0]["tls"], "required");
    for command in [&["convert", "tls-of-this-test.raw", "copy.raw"][..], &["check", "tls-of-this-test.raw"]] {
        let said = fails(dir, 1, command);
        assert!(said.contains("nbds+unix:") && said.contains("tls-certificates=DIR"), "{command:?}: {said}");
        assert!(!said.contains("the server asks for TLS"), "{command:?}: {said}");
    }
    assert!(served.terminate().success());
}
