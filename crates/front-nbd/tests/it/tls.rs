//! TLS: the modes, client certificates, and what must not cross STARTTLS.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use spile_engine::EngineKind;
use spile_front_nbd::TlsFiles;
use spile_front_nbd::wire::handshake::{option, rep};
use spile_front_nbd::wire::request::Command;

use crate::client::{Client, connect, go_data, option_bytes};
use crate::engines::{on_each_engine, run_on_aio};
use crate::{Rig, rig_with};

type TlsClient = Client<StreamOwned<ClientConnection, UnixStream>>;

/// Certificates in files: an authority, a server and a client of it, and a client of nobody's.
struct Papers {
    dir: tempfile::TempDir,
}

impl Papers {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(dir.path().join("ca.pem"), ca.pem()).unwrap();
        for name in ["server", "client"] {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
            let certificate = params.signed_by(&key, &ca).unwrap();
            std::fs::write(dir.path().join(format!("{name}.pem")), certificate.pem()).unwrap();
            std::fs::write(dir.path().join(format!("{name}.key")), key.serialize_pem()).unwrap();
        }
        let stranger = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        std::fs::write(dir.path().join("stranger.pem"), stranger.cert.pem()).unwrap();
        let key = stranger.signing_key.serialize_pem();
        std::fs::write(dir.path().join("stranger.key"), key).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn config(&self, required: bool, client_ca: bool) -> TlsFiles {
        TlsFiles {
            cert_chain_pem: self.path("server.pem"),
            key_pem: self.path("server.key"),
            client_ca_pem: client_ca.then(|| self.path("ca.pem")),
            required,
        }
    }

    fn client_config(&self, identity: Option<&str>) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.path("ca.pem")).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match identity {
            None => builder.with_no_client_auth(),
            Some(name) => {
                let pem = self.path(&format!("{name}.pem"));
                let key = PrivateKeyDer::from_pem_file(self.path(&format!("{name}.key"))).unwrap();
                let chain = vec![CertificateDer::from_pem_file(pem).unwrap()];
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        Arc::new(config)
    }
}

fn tls_rig(kind: EngineKind, papers: &Papers, required: bool, client_ca: bool) -> Rig {
    let tls = papers.config(required, client_ca);
    rig_with(kind, |_, config| config.tls = Some(tls))
}

/// Greets and starts TLS; the handshake itself happens at the first bytes.
fn start_tls(path: &Path, config: Arc<ClientConfig>) -> TlsClient {
    let mut plain = connect(path);
    plain.greet();
    assert_eq!(plain.ask(option::STARTTLS, &[])[0].0, rep::ACK);
    let name = "localhost".try_into().unwrap();
    let connection = ClientConnection::new(config, name).unwrap();
    Client::new(StreamOwned::new(connection, plain.stream))
}

fn try_list(client: &mut TlsClient) -> std::io::Result<()> {
    use std::io::{Read, Write};
    client.stream.write_all(&option_bytes(option::LIST, &[]))?;
    client.stream.flush()?;
    client.stream.read_exact(&mut [0; 20])
}

on_each_engine! {
    fn a_disk_through_tls(kind) {
        let papers = Papers::new();
        let rig = tls_rig(kind, &papers, true, false);
        let mut client = start_tls(&rig.path(), papers.client_config(None));
        assert_eq!(client.ask(option::STARTTLS, &[])[0].0, rep::ERR_INVALID);
        assert_eq!(client.enter("", true).0, crate::SIZE);
        let data: Vec<u8> = (0..3u32 << 20).map(|at| (at ^ (at >> 11)) as u8).collect();
        assert_eq!(client.call_write(0, 4096, &data).errno, 0);
        assert!(client.read(4096, 3 << 20) == data);
        for at in 0..100 {
            assert_eq!(client.read(4096 + at, 512)[..], data[at as usize..at as usize + 512]);
        }
        client.request(Command::Disconnect, 0, 0, 0);
        assert_eq!(std::io::Read::read(&mut client.stream, &mut [0; 1]).unwrap(), 0, "close_notify");
        rig.assert_clean();
    }

    fn many_requests_in_flight_through_tls(kind) {
        let papers = Papers::new();
        let rig = tls_rig(kind, &papers, true, false);
        let mut client = start_tls(&rig.path(), papers.client_config(None));
        client.enter("", false);
        for _ in 0..20 {
            (0..20).for_each(|at| { client.request(Command::Read, 0, at * 4096, 4096); });
            for _ in 0..20 {
                assert_eq!(client.answer(|_| Some((0, 4096))).errno, 0);
            }
        }
    }

    fn required_tls_shows_nothing_in_plain(kind) {
        let papers = Papers::new();
        let rig = tls_rig(kind, &papers, true, false);
        let mut client = connect(&rig.path());
        client.greet();
        assert_eq!(client.ask(option::LIST, &[])[0].0, rep::ERR_TLS_REQD);
        assert_eq!(client.ask(option::GO, &go_data(""))[0].0, rep::ERR_TLS_REQD);
        client.option(option::EXPORT_NAME, b"");
        assert!(client.at_end());
    }

    fn optional_tls_serves_both(kind) {
        let papers = Papers::new();
        let rig = tls_rig(kind, &papers, false, false);
        let mut plain = crate::client::ready(&rig.path(), true);
        assert_eq!(plain.read(0, 512), [0; 512]);
        let mut client = start_tls(&rig.path(), papers.client_config(None));
        client.enter("", true);
        assert_eq!(client.read(0, 512), [0; 512]);
    }

    fn client_certificates_are_checked(kind) {
        let papers = Papers::new();
        let rig = tls_rig(kind, &papers, true, true);
        assert!(try_list(&mut start_tls(&rig.path(), papers.client_config(Some("client")))).is_ok());
        assert!(try_list(&mut start_tls(&rig.path(), papers.client_config(None))).is_err());
        assert!(try_list(&mut start_tls(&rig.path(), papers.client_config(Some("stranger")))).is_err());
        rig.assert_clean();
    }

    /// CVE-2021-3716: what was sent in plain text together with STARTTLS is never taken for a later option.
    fn plaintext_kept_across_starttls(kind) {
        let papers = Papers::new();
        let rig = tls_rig(kind, &papers, true, false);
        let mut client = connect(&rig.path());
        client.greet();
        let smuggled = option_bytes(option::STRUCTURED_REPLY, &[]);
        client.send(&[option_bytes(option::STARTTLS, &[]), smuggled].concat());
        // Either it all arrived at once, and the server hung up on it; or the rest arrived later and is garbage
        // to TLS. Never is there an answer to the option.
        let answer = client.read_to_end();
        let ack_only = answer.len() < 20 || answer[12..16] == rep::ACK.to_be_bytes();
        let smuggled_reply = [3u64.to_be_bytes(), 8u64.to_be_bytes()].concat();
        assert!(ack_only && !answer.windows(16).any(|window| window == smuggled_reply));
        assert!(answer.len() <= 20 + 7, "an acknowledgement and an alert at most: {answer:?}");
        rig.assert_clean();
    }

    fn data_before_tls_finishes(kind) {
        let papers = Papers::new();
        let rig = tls_rig(kind, &papers, true, false);
        for bytes in [go_data(""), option_bytes(option::GO, &go_data("")), vec![0x16; 300], vec![0; 5]] {
            let mut client = connect(&rig.path());
            client.greet();
            client.ask(option::STARTTLS, &[]);
            client.send(&bytes);
            client.half_close();
            let answer = client.read_to_end();
            assert!(answer.len() <= 7, "an alert at most: {answer:?}");
        }
        rig.assert_clean();
    }

    fn a_tls_handshake_that_never_ends_times_out(kind) {
        let papers = Papers::new();
        let tls = papers.config(true, false);
        let rig = rig_with(kind, |_, config| {
            config.tls = Some(tls);
            config.handshake_timeout = Duration::from_millis(300);
        });
        let mut client = connect(&rig.path());
        client.greet();
        client.ask(option::STARTTLS, &[]);
        client.read_to_end();
        rig.assert_clean();
    }

    fn close_at_every_step_of_the_tls_handshake(kind) {
        let papers = Papers::new();
        let rig = tls_rig(kind, &papers, true, false);
        let mut hello = Vec::new();
        let config = papers.client_config(None);
        let mut connection = ClientConnection::new(config, "localhost".try_into().unwrap()).unwrap();
        connection.write_tls(&mut hello).unwrap();
        for cut in (0..=hello.len()).step_by(7) {
            let mut client = connect(&rig.path());
            client.greet();
            client.ask(option::STARTTLS, &[]);
            client.send(&hello[..cut]);
        }
        rig.assert_clean();
    }
}

#[test]
fn unusable_certificates_are_named() {
    use spile_core::ErrorKind;
    use spile_engine::{Config, Engine};
    use spile_store::MemStore;
    let papers = Papers::new();
    let config = Config { kind: EngineKind::Threads, workers: 1, pool_bytes: 2 << 20, ..Config::default() };
    let engine = Engine::start(config).unwrap();
    std::fs::write(papers.path("empty.pem"), "").unwrap();
    for (cert, key, kind) in [
        ("none.pem", "server.key", ErrorKind::NotFound),
        ("empty.pem", "server.key", ErrorKind::InvalidInput),
        ("server.pem", "client.key", ErrorKind::InvalidInput),
        ("server.pem", "empty.pem", ErrorKind::InvalidInput),
    ] {
        let tls = TlsFiles {
            cert_chain_pem: papers.path(cert),
            key_pem: papers.path(key),
            client_ca_pem: None,
            required: true,
        };
        let config = spile_front_nbd::ServerConfig { tls: Some(tls), ..Default::default() };
        let exports: Vec<spile_front_nbd::Export<crate::disk::StoreDisk<MemStore>>> = Vec::new();
        let error = spile_front_nbd::Server::new(engine.clone(), config, exports).err();
        let error = error.unwrap_or_else(|| panic!("{cert} and {key} do not go together"));
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.path().is_some(), "{error}");
    }
    engine.shutdown();
}
