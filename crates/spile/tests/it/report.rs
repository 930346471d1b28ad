//! `spile report`: its page and its errors; what a browser makes of the page is seen in `tests/peer/test_report.py`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::common::guests::{nbd, serve};
use crate::common::{fails, ok, spile};

/// Ended with the test.
struct Page(Child);

impl Drop for Page {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The status, and the whole answer.
fn get(address: &str, path: &str, host: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    (answer[9..12].parse().unwrap(), answer)
}

#[test]
fn a_page_is_made_of_the_results_in_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["bench", "exchange", "--quick", "--out", "results"]);
    std::fs::write(dir.path().join("results/other.json"), "{}").unwrap();
    let said = ok(dir.path(), &["report", "results", "-o", "report.html"]);
    assert!(said.starts_with("report.html: 1 results, 1 figures"), "{said}");
    let page = std::fs::read_to_string(dir.path().join("report.html")).unwrap();
    assert!(page.contains("exchange") && page.contains("results/other.json") && page.contains("role=\"img\""));
}

#[test]
fn what_is_not_there_is_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    assert!(fails(dir.path(), 1, &["report", "nowhere", "-o", "x.html"]).contains("nowhere"));
    assert!(fails(dir.path(), 1, &["report", "empty", "-o", "x.html"]).contains("no JSON file in empty"));
    fails(dir.path(), 2, &["report", "empty"]);
    assert!(fails(dir.path(), 1, &["report", "--live", "nobody"]).contains("nobody"));
}

#[test]
fn a_running_server_is_shown_to_this_host_alone() {
    let dir = tempfile::tempdir().unwrap();
    let _served = serve(dir.path(), &["mem:16M", "--nbd", "unix:n"]);
    let mut command = spile();
    command.args(["report", "--live", "c"]).current_dir(dir.path()).stdout(Stdio::piped());
    let mut live = Page(command.spawn().unwrap());
    let mut url = String::new();
    BufReader::new(live.0.stdout.take().unwrap()).read_line(&mut url).unwrap();
    let (address, token) = url.trim().trim_start_matches("http://").trim_end_matches('/').split_once('/').unwrap();
    assert!(address.starts_with("127.0.0.1:") && token.len() == 32, "{url}");
    let (page, figures) = (format!("/{token}/"), format!("/{token}/figures"));

    let (status, answer) = get(address, &page, address);
    assert!(status == 200 && answer.contains("content-security-policy") && answer.contains("<script>"), "{answer}");
    let port = address.split(':').nth(1).unwrap();
    assert_eq!(get(address, &page, &format!("localhost:{port}")).0, 200);
    for path in ["/", "/figures", "/00000000000000000000000000000000/"] {
        assert_eq!(get(address, path, address).0, 403, "{path}");
    }
    for host in ["evil.example", &format!("evil.example:{port}"), "127.0.0.1", ""] {
        assert_eq!(get(address, &figures, host).0, 403, "{host}");
    }

    // The first look was when it began; what comes between is drawn after the second one.
    let uri = nbd(dir.path(), "").to_string();
    ok(dir.path(), &["load", &uri, "--rw", "randread", "--runtime", "1s"]);
    let (status, figures) = get(address, &figures, address);
    assert_eq!(status, 200);
    for part in ["<figure", "average queue size", "requests per second", "class=\"m "] {
        assert!(figures.contains(part), "{part} is not in {figures}");
    }
}
