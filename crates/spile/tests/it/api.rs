//! The control API and the commands that use it: what a server is asked and told while it runs.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::common::control::{ask, http};
use crate::common::guests::{guest, nbd, rest_of_stderr, serve};
use crate::common::nbd::Client;
use crate::common::{Served, assert_silent, eventually, fails, json, ok, spile};
use serde_json::Value;
use spile::uri::{Address, NbdUri};
use spile_lab::GuestQueue;

const MIB: u64 = 1 << 20;

fn get(dir: &Path, path: &str) -> (u16, Value) {
    let (status, body) = http(&dir.join("c"), &format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n"));
    (status, serde_json::from_str(&body).unwrap())
}

fn send(dir: &Path, method: &str, path: &str, body: &str) -> (u16, Value) {
    ask(&dir.join("c"), method, path, body)
}

fn start(args: &[&str]) -> (tempfile::TempDir, Served) {
    let dir = tempfile::tempdir().unwrap();
    for disk in ["a.raw", "b.raw"] {
        ok(dir.path(), &["create", disk, "--size", "16M"]);
    }
    let served = serve(dir.path(), args);
    (dir, served)
}

#[test]
fn a_server_says_what_it_serves_and_what_was_done_with_it() {
    let (dir, served) = start(&["a.raw,name=x", "b.raw,read-only", "--vhost-user", "v", "--nbd", "unix:n"]);
    let dir = dir.path();
    let (_device, mut queue) = guest(&dir.join("v"));
    for _ in 0..10 {
        queue.write(0, &[1; 4096]).unwrap();
    }
    let list = json(dir, &["ls", "c"]);
    let disk = &list["disks"][0];
    assert_eq!((&disk["name"], &disk["format"]), (&"x".into(), &"raw".into()));
    assert_eq!(disk["virtual_size_bytes"], 16 * MIB);
    assert!(disk["server"].as_str().unwrap().ends_with("/c"), "{disk}");
    let ways: Vec<_> = disk["exports"].as_array().unwrap().iter().map(|e| (&e["protocol"], &e["name"])).collect();
    assert_eq!(ways.len(), 3, "{disk}");
    assert!(ways.contains(&(&"vhost-user".into(), &"".into())) && ways.contains(&(&"nbd".into(), &"x".into())));
    assert_eq!(list["disks"][1]["read_only"], true);
    let shown = json(dir, &["show", "c"]);
    assert_eq!(shown["connections"], 1);
    let engine = shown["engine"].as_str().unwrap();
    assert!(["uring", "aio", "threads"].contains(&engine));
    assert!(shown["engine_about"].as_str().unwrap().starts_with(&format!("engine {engine} ")), "{shown}");
    assert_eq!(shown["layers"][0]["format"], "raw");
    let meters = shown["meters"].as_array().unwrap();
    let writes = |layer: &dyn Fn(&str) -> bool| {
        let meter = meters.iter().find(|meter| layer(meter["layer"].as_str().unwrap())).unwrap();
        meter["operations"].as_array().unwrap().iter().find(|op| op["operation"] == "write").unwrap()
    };
    let front = writes(&|layer| layer == "front vhost-user \"\"");
    let disk = writes(&|layer| layer == "disk");
    let image = writes(&|layer| layer.starts_with("image ") && layer.ends_with(".raw"));
    for writes in [front, disk, image] {
        assert_eq!((&writes["requests"], &writes["bytes"], &writes["errors"]), (&10.into(), &40960.into(), &0.into()));
    }
    assert!(front["latency_p50_us"].as_f64().unwrap() > 0.0, "{front}");
    for text in [ok(dir, &["ls", "c"]), ok(dir, &["show", "c", "--name", "x"])] {
        assert!(text.contains("16 MiB") && text.contains("vhost-user"), "{text}");
    }
    let (status, document) = get(dir, "/v1/openapi.json");
    assert_eq!(status, 200);
    for path in ["/v1/openapi.json", "/v1/disks", "/v1/disks/{name}", "/v1/exports", "/v1/log-level", "/v1/shutdown"] {
        assert!(document["paths"][path].is_object(), "{path}");
    }
    assert!(document["components"]["schemas"]["DiskDetail"].is_object());
    assert!(served.terminate().success());
}

#[test]
fn errors_are_json_with_what_to_do() {
    let (dir, served) = start(&["a.raw", "--nbd", "unix:n"]);
    let dir = dir.path();
    let cases: [(&str, &str, &str, u16, &str); 9] = [
        ("GET", "/v1/disks/nobody", "", 404, "not_found"),
        ("GET", "/v2", "", 404, "not_found"),
        ("PUT", "/v1/disks", "", 405, "invalid_input"),
        ("PATCH", "/v1/disks/a", "{", 400, "invalid_input"),
        ("PATCH", "/v1/disks/a", "{\"virtual_size_bytes\":1,\"more\":2}", 400, "invalid_input"),
        ("PATCH", "/v1/disks/a", "{\"size_bytes\":512}", 422, "unsupported"),
        ("POST", "/v1/disks", "{\"disk\":\"/nowhere/x.raw\"}", 404, "not_found"),
        ("POST", "/v1/disks", "{\"disk\":\"b.raw,what\"}", 400, "invalid_input"),
        ("PUT", "/v1/log-level", "{\"level\":\"loud\"}", 400, "invalid_input"),
    ];
    for (method, path, body, status, kind) in cases {
        let (found, answer) = send(dir, method, path, body);
        let error = &answer["error"];
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{method} {path}: {answer}");
        if path != "/v1/disks/a" || status != 422 {
            assert_eq!((found, error["kind"].as_str()), (status, Some(kind)), "{method} {path}: {answer}");
        }
        for name in ["path", "offset_bytes", "hint"] {
            assert!(error.get(name).is_some(), "{name}: {answer}");
        }
    }
    let (status, answer) = send(dir, "PUT", "/v1/log-level", "{\"level\":\"debug\"}");
    assert_eq!((status, &answer["level"]), (200, &"debug".into()));
    let long = format!("{{\"disk\":\"{}\"}}", "x".repeat(1 << 20));
    let (status, _) = send_long(dir, &long);
    assert!(status == 400 || status == 0, "{status}");
    assert!(served.terminate().success());
}

/// As [`send`], to a server that may hang up before all is sent.
fn send_long(dir: &Path, body: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(dir.join("c")).unwrap();
    let head = format!("POST /v1/disks HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    (answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0), answer)
}

#[test]
fn disks_come_and_go_while_others_are_served() {
    let (dir, served) = start(&["a.raw", "--vhost-user", "v", "--nbd", "unix:n"]);
    let dir = dir.path();
    let (_device, mut queue) = guest(&dir.join("v"));
    let early = Client::connect(&nbd(dir, "")).unwrap();
    early.write(0, &[1; 512], false).unwrap();
    ok(dir, &["attach", "c", "b.raw,name=y", "--vhost-user", "w", "--nbd", "unix:m"]);
    // All that were connected are still there.
    queue.write(0, &[2; 512]).unwrap();
    early.read(0, &mut [0; 512]).unwrap();
    // The new disk is there in every way.
    let client = Client::connect(&nbd(dir, "y")).unwrap();
    client.write(4096, &[3; 512], true).unwrap();
    let other_socket = NbdUri::new(Address::Unix(dir.join("m")), "y");
    let mut bytes = [0; 512];
    let other = Client::connect(&other_socket).unwrap();
    other.read(4096, &mut bytes).unwrap();
    assert_eq!(bytes, [3; 512]);
    let (device, mut second) = guest(&dir.join("w"));
    assert_eq!(second.read(4096, 512).unwrap(), [3; 512]);
    assert_eq!(json(dir, &["ls", "c"])["disks"].as_array().unwrap().len(), 2);
    let said = fails(dir, 1, &["attach", "c", "b.raw,name=z"]);
    assert!(said.contains("served already"), "{said}");
    let said = fails(dir, 1, &["attach", "c", "b.raw,name=y"]);
    assert!(said.contains("a disk named \"y\" is served already"), "{said}");
    // Who uses it keeps it.
    let said = fails(dir, 1, &["detach", "c", "--name", "y"]);
    assert!(said.contains("in use by 3 connection(s)") && said.contains("--force"), "{said}");
    client.read(4096, &mut bytes).unwrap();
    drop((second, device));
    drop(client);
    drop(other);
    eventually("it can be detached", || crate::common::run(dir, &["detach", "c", "--name", "y"]).status.success());
    assert!(!dir.join("w").exists(), "its socket is gone");
    assert!(Client::connect(&nbd(dir, "y")).is_err());
    queue.write(0, &[4; 512]).unwrap();
    early.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [4; 512]);
    // It is closed: another program may have it, and it may come back.
    ok(dir, &["convert", "b.raw", "copy.raw"]);
    ok(dir, &["attach", "c", "b.raw"]);
    let client = Client::connect(&nbd(dir, "b")).unwrap();
    client.read(4096, &mut bytes).unwrap();
    assert_eq!(bytes, [3; 512]);
    // By force its clients are cut off.
    ok(dir, &["detach", "c", "--name", "b", "--force"]);
    client.read(0, &mut bytes).expect_err("its clients are cut off");
    assert!(served.terminate().success());
}

/// An NBD export has no lock that would keep a second writer out.
#[test]
fn an_nbd_export_is_served_twice_only_when_it_is_only_read() {
    let (dir, below) = start(&["a.raw", "--nbd", "unix:n"]);
    let dir = dir.path();
    let uri = format!("nbd+unix:///?socket={}", dir.join("n").display());
    let spec = |what: &str| format!("{uri},{what}");
    let front = |control: &str, disks: &[&str]| {
        let args = [&["serve"], disks, &["--nbd", "unix:m", "--control", control]].concat();
        Served::spawn(spile().args(args).current_dir(dir), dir.join("m"))
    };
    let served = front("d", &[&spec("name=a")]).unwrap();
    for other in ["format=vhd,name=b", "name=b", "read-only,name=b"] {
        let said = fails(dir, 1, &["attach", "d", &spec(other)]);
        assert!(said.contains("served already, as \"a\""), "{other}: {said}");
    }
    assert!(served.terminate().success());
    let said = front("d", &[&spec("name=a"), &spec("format=vhd,name=b")]).err().expect("two writers");
    assert!(said.contains("is given twice: as \"a\" and as \"b\""), "{said}");
    let served = front("d", &[&spec("read-only,name=a"), &spec("read-only,name=b")]).unwrap();
    ok(dir, &["attach", "d", &spec("read-only,name=c")]);
    assert!(served.terminate().success());
    assert!(below.terminate().success());
}

#[test]
fn an_attach_that_fails_changes_nothing() {
    let (dir, served) = start(&["a.raw", "--nbd", "unix:n"]);
    let dir = dir.path();
    std::fs::write(dir.join("w"), "no socket").unwrap();
    let said = fails(dir, 1, &["attach", "c", "b.raw", "--vhost-user", "w"]);
    assert!(said.contains("no socket is in the way"), "{said}");
    assert_eq!(json(dir, &["ls", "c"])["disks"].as_array().unwrap().len(), 1);
    assert!(Client::connect(&nbd(dir, "b")).is_err());
    Client::connect(&nbd(dir, "")).unwrap().read(0, &mut [0; 512]).unwrap();
    ok(dir, &["attach", "c", "b.raw"]);
    Client::connect(&nbd(dir, "b")).unwrap().read(0, &mut [0; 512]).unwrap();
    assert!(served.terminate().success());
}

#[test]
fn ways_come_and_go() {
    let (dir, served) = start(&["a.raw", "--nbd", "unix:n"]);
    let dir = dir.path();
    let address = format!("unix:{}", dir.join("w").display());
    let body = format!("{{\"protocol\":\"vhost-user\",\"address\":\"{address}\",\"disk\":\"a\"}}");
    assert_eq!(send(dir, "POST", "/v1/exports", &body).0, 201);
    assert_eq!(send(dir, "POST", "/v1/exports", &body).0, 409);
    let (_device, mut queue) = guest(&dir.join("w"));
    queue.write(0, &[5; 512]).unwrap();
    let path = format!("/v1/exports/{}", address.replace('/', "%2F"));
    assert_eq!(send(dir, "DELETE", &path, "").0, 200);
    assert_eq!(send(dir, "DELETE", &path, "").0, 404);
    assert!(!dir.join("w").exists());
    // A guest that is connected stays.
    assert_eq!(queue.read(0, 512).unwrap(), [5; 512]);
    assert!(served.terminate().success());
}

#[test]
fn an_order_ends_a_server_as_a_signal_does() {
    let (dir, mut served) = start(&["a.raw", "--vhost-user", "v"]);
    let dir = dir.path();
    assert_eq!(send(dir, "POST", "/v1/shutdown", "").0, 202);
    assert_eq!(served.wait().code(), Some(0));
    assert!(!dir.join("c").exists() && !dir.join("v").exists());
    assert_eq!(rest_of_stderr(&mut served), "");
}

#[test]
fn slow_and_many_callers_hold_nobody_up() {
    let (dir, served) = start(&["a.raw", "--vhost-user", "v"]);
    let dir = dir.path();
    // This process takes all the places that one may have, and says little or nothing on them.
    let says = ["", "G", "GET /v1/disks HTTP/1.1\r\n", "POST /v1/disks HTTP/1.1\r\ncontent-length: 100\r\n\r\n{", "{"];
    let slow: Vec<UnixStream> = (0..40)
        .map(|number| {
            let mut stream = UnixStream::connect(dir.join("c")).unwrap();
            stream.write_all(says[number % says.len()].as_bytes()).unwrap();
            stream
        })
        .collect();
    // Other processes are heard at once, and orders are carried out.
    assert_eq!(json(dir, &["ls", "c"])["disks"][0]["name"], "a");
    ok(dir, &["resize", "c", "32M"]);
    // In the end they are hung up on.
    for mut stream in slow {
        stream.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    }
    assert_eq!(get(dir, "/v1/disks").0, 200);
    assert!(served.terminate().success());
}

#[test]
fn a_server_that_was_asked_comes_to_rest() {
    let (dir, served) = start(&["a.raw", "--vhost-user", "v"]);
    let dir = dir.path();
    assert_eq!(get(dir, "/v1/disks").0, 200);
    ok(dir, &["resize", "c", "32M"]);
    assert_silent(served.child.id(), "nobody asks any more");
    assert!(served.terminate().success());
}

/// Servers without --control are found by name.
#[test]
fn servers_are_found_by_the_names_of_their_disks() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let run = dir.join("run");
    let with = |args: &[&str]| {
        let mut command = spile();
        command.args(args).current_dir(dir).env("SPILE_RUN_DIR", &run);
        command
    };
    let said = |args: &[&str]| {
        let output = with(args).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    for disk in ["a.raw", "b.raw"] {
        ok(dir, &["create", disk, "--size", "16M"]);
    }
    std::fs::create_dir(dir.join("sub")).unwrap();
    ok(dir, &["create", "sub/a.raw", "--size", "16M"]);
    assert_eq!(said(&["ls", "--json"]).0, Some(0), "no folder, no servers");
    let serve = |disk: &str, socket: &str, more: &[&str]| {
        Served::spawn(with(&["serve", disk, "--vhost-user", socket]).args(more), dir.join(socket)).unwrap()
    };
    let (first, second) = (serve("a.raw", "v1", &[]), serve("b.raw", "v2", &[]));
    let names = |dir: &Path| crate::common::guests::names_in(dir);
    assert_eq!(names(&run), ["a.control", "b.control"]);
    let hidden = serve("null:1M", "v3", &["--control", "none"]);
    assert_eq!(names(&run), ["a.control", "b.control"]);
    // Another disk of the same name.
    let same = serve("sub/a.raw", "v4", &[]);
    assert_eq!(names(&run), ["a-2.control", "a.control", "b.control"]);
    let (code, list, _) = said(&["ls", "--json"]);
    let list: Value = serde_json::from_str(&list).unwrap();
    assert_eq!((code, list["disks"].as_array().unwrap().len()), (Some(0), 3));
    assert_eq!(said(&["resize", "b", "32M"]).0, Some(0));
    assert_eq!(said(&["resize", "sub/a.raw", "64M"]).0, Some(0), "by its path");
    assert_eq!(std::fs::metadata(dir.join("sub/a.raw")).unwrap().len(), 64 * MIB);
    let (code, _, err) = said(&["show", "a"]);
    assert!(code == Some(2) && err.contains("several servers have a disk \"a\""), "{err}");
    let (code, _, err) = said(&["show", "nobody"]);
    assert!(code == Some(1) && err.contains("no server has a disk \"nobody\""), "{err}");
    assert_eq!(said(&["attach", "b", "null:1M,name=n"]).0, Some(0));
    assert_eq!(said(&["detach", "n"]).0, Some(0));
    // The socket of a dead server is passed over, and its name is taken by the next one.
    first.kill();
    assert_eq!(names(&run), ["a-2.control", "a.control", "b.control"]);
    eventually("the dead are not listed", || {
        let list: Value = serde_json::from_str(&said(&["ls", "--json"]).1).unwrap();
        list["disks"].as_array().unwrap().len() == 2
    });
    for served in [second, hidden, same] {
        assert!(served.terminate().success());
    }
    assert_eq!(names(&run), ["a.control"]);
}

#[test]
fn without_a_folder_for_its_socket_a_server_serves_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.raw", "--size", "16M"]);
    std::fs::write(dir.join("file"), "").unwrap();
    let mut command = spile();
    command.args(["serve", "a.raw", "--vhost-user", "v"]).current_dir(dir).env("SPILE_RUN_DIR", dir.join("file/run"));
    let mut served = Served::spawn(&mut command, dir.join("v")).unwrap();
    let (_device, mut queue) = guest(&dir.join("v"));
    queue.write(0, &[1; 512]).unwrap();
    served.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(served.wait().success());
    let said = rest_of_stderr(&mut served);
    assert!(said.contains("there is no control socket: "), "{said}");
    // A socket that was asked for is another matter.
    fails(dir, 1, &["serve", "a.raw", "--vhost-user", "v", "--control", "file/c"]);
}
