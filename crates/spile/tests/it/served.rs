//! Commands that look at a disk while a server has it open.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;

use crate::common::control::ask;
use crate::common::guests::{Load, rest_of_stderr};
use crate::common::nbd::Client;
use crate::common::{Served, fails, json, ok, run, spile};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Serves `args` with a control socket in the folder of such sockets, where commands look for it.
fn serve(dir: &Path, args: &[&str]) -> Served {
    let mut command = spile();
    command.arg("serve").args(args).current_dir(dir);
    Served::spawn(&mut command, dir.join("n")).unwrap_or_else(|err| panic!("serve {args:?}: {err}"))
}

/// The answer without what differs between a server's answer and a look when it has ended: who says it, the space that is kept ready,
/// whether there is something to flush, and how many blocks a parent has, as a server reads a parent's table only where it needs it.
fn plain(mut info: Value) -> Value {
    info["served_by"] = Value::Null;
    info["used_bytes"] = Value::Null;
    for layer in info["layers"].as_array_mut().unwrap() {
        layer["used_bytes"] = Value::Null;
        layer["file_bytes"] = Value::Null;
        layer["facts"]["unflushed"] = Value::Null;
    }
    for parent in info["layers"].as_array_mut().unwrap().iter_mut().skip(1) {
        parent["facts"]["allocated_blocks"] = Value::Null;
    }
    info
}

/// A parent and its child, in the folder `dir`.
fn family(dir: &Path) {
    fs::write(dir.join("base.raw"), [7; MIB as usize]).unwrap();
    ok(dir, &["convert", "base.raw", "parent.vhd", "--size", "64M"]);
    ok(dir, &["create", "child-of-this-test.vhd", "--parent", "parent.vhd"]);
}

#[test]
fn a_server_tells_under_load_what_its_disk_is_and_where_its_bytes_lie() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    family(dir);
    let disk = "child-of-this-test.vhd";
    let served = serve(dir, &[disk, "--vhost-user", "v"]);
    let mut load = Load::start(dir, "v", &["--span", "48M"]);
    for _ in 0..5 {
        load.goes_on(&served);
        let info = json(dir, &["info", disk]);
        assert_eq!(info["served_by"]["pid"], served.child.id());
        assert_eq!((info["layers"].as_array().unwrap().len(), &info["virtual_size_bytes"]), (1, &(64 * MIB).into()));
        let map = json(dir, &["map", disk]);
        let len_bytes = |run: &Value| run["len_bytes"].as_u64().unwrap();
        assert_eq!(map["runs"].as_array().unwrap().iter().map(len_bytes).sum::<u64>(), 64 * MIB);
    }
    // The load ends with a flush, and finds all that it wrote.
    assert_eq!(load.end(), 0);
    let say = || (json(dir, &["info", disk, "--chain"]), json(dir, &["map", disk]));
    let (info, map) = say();
    let text = ok(dir, &["info", disk]);
    assert!(
        text.trim_end().ends_with("; as that server says") && text.contains("served as \"child-of-this-test\" by "),
        "{text}"
    );
    assert!(ok(dir, &["map", disk]).trim_end().ends_with("; as that server says"));
    assert!(info["layers"][0]["facts"]["allocated_blocks"].as_u64() > Some(20), "{info}");
    assert!(map["layers"][1]["path"].as_str().unwrap().ends_with("parent.vhd"), "{map}");
    assert!(served.terminate().success());
    // The images say the same themselves.
    let (own_info, mut own_map) = say();
    assert_eq!((&own_info["served_by"], plain(info)), (&Value::Null, plain(own_info.clone())));
    own_map["served_by"] = map["served_by"].clone();
    assert_eq!(map, own_map);
}

/// A map of more runs than one answer of the server has.
#[test]
fn a_long_map_comes_in_parts() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let disk = "long-map-of-this-test.raw";
    let file = fs::File::create(dir.join(disk)).unwrap();
    file.set_len(64 * MIB).unwrap();
    for number in 0..3000 {
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; 4096], number * 16384).unwrap();
    }
    drop(file);
    let served = serve(dir, &[disk, "--nbd", "unix:n"]);
    let map = json(dir, &["map", disk]);
    let server = map["served_by"]["server"].as_str().unwrap();
    let (status, part) = ask(Path::new(&server), "GET", "/v1/disks/long-map-of-this-test/map", "");
    assert_eq!((status, part["runs"].as_array().unwrap().len()), (200, 4096));
    let next = part["next_offset_bytes"].as_u64().unwrap();
    let path = format!("/v1/disks/long-map-of-this-test/map?max_runs=2&offset_bytes={next}");
    let (_, part) = ask(Path::new(&server), "GET", &path, "");
    assert_eq!((part["runs"].as_array().unwrap().len(), part["runs"][0]["offset_bytes"].as_u64()), (2, Some(next)));
    let (_, end) = ask(Path::new(&server), "GET", "/v1/disks/long-map-of-this-test/map?offset_bytes=67108864", "");
    assert_eq!((&end["runs"], &end["next_offset_bytes"]), (&Value::Array(Vec::new()), &Value::Null));
    for query in ["offset_bytes=x", "offset_bytes", "more=1"] {
        let (status, answer) =
            ask(Path::new(&server), "GET", &format!("/v1/disks/long-map-of-this-test/map?{query}"), "");
        assert_eq!((status, &answer["error"]["kind"]), (400, &"invalid_input".into()), "{query}");
    }
    assert!(served.terminate().success());
    assert_eq!(map["runs"], json(dir, &["map", disk])["runs"]);
    assert_eq!(map["summary"]["run_count"], 6000);
}

#[test]
fn what_is_served_for_reading_only_is_read_by_everybody() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    family(dir);
    let served = serve(dir, &["parent.vhd,read-only", "--nbd", "unix:n"]);
    for disk in ["parent.vhd", "child-of-this-test.vhd"] {
        assert_eq!(json(dir, &["info", disk, "--chain"])["served_by"], Value::Null);
        assert_eq!(json(dir, &["map", disk])["summary"]["data_bytes"], MIB);
        ok(dir, &["compare", "base.raw", disk]);
        ok(dir, &["convert", disk, &format!("{disk}.copy"), "--to", "raw"]);
        ok(dir, &["check", disk]);
    }
    // A child that is served for writing shares its parent, too.
    let child = {
        let mut command = spile();
        command.args(["serve", "child-of-this-test.vhd", "--nbd", "unix:m"]).current_dir(dir);
        Served::spawn(&mut command, dir.join("m")).unwrap()
    };
    assert_eq!(json(dir, &["info", "parent.vhd"])["served_by"], Value::Null);
    ok(dir, &["compare", "parent.vhd", "base.raw"]);
    assert!(child.terminate().success() && served.terminate().success());
}

#[test]
fn the_bytes_of_a_disk_that_is_served_are_read_through_its_nbd_socket() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    family(dir);
    let disk = "child-of-this-test.vhd";
    let served = serve(dir, &[disk, "--nbd", "unix:n"]);
    let uri = spile::uri::NbdUri::new(spile::uri::Address::Unix(dir.join("n")), "");
    Client::connect(&uri).unwrap().write(8 * MIB, &[9; 4096], true).unwrap();
    let output = run(dir, &["convert", disk, "copy.raw"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains("in use: read through nbd+unix:"), "{said}");
    let copy = fs::read(dir.join("copy.raw")).unwrap();
    assert_eq!((copy[0], copy[8 << 20], copy[9 << 20]), (7, 9, 0));
    ok(dir, &["compare", disk, "copy.raw"]);
    let measured = json(dir, &["measure", disk, "--to", "raw"]);
    assert_eq!(measured["data_bytes"], MIB + 4096);
    // Its metadata are the server's alone.
    let said = fails(dir, 1, &["check", disk]);
    assert!(
        said.contains("it is served as \"child-of-this-test\" by ") && said.contains("name it by nbd+unix:"),
        "{said}"
    );
    assert!(served.terminate().success());
}

#[test]
fn a_disk_that_is_read_through_its_server_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    family(dir);
    let disk = "child-of-this-test.vhd";
    let served = serve(dir, &[disk, "--nbd", "unix:n", "--nbd", "unix:m"]);
    let uri = spile::uri::NbdUri::new(spile::uri::Address::Unix(dir.join("n")), "");
    Client::connect(&uri).unwrap().write(8 * MIB, &[9; 4096], true).unwrap();
    let other = "nbd+unix:///?socket=m";
    for (src, dst) in [(disk, "nbd+unix:///?socket=n"), (disk, other), (&*uri.to_string(), other)] {
        let said = fails(dir, 2, &["convert", src, dst]);
        assert!(said.contains("while it is copied"), "{src} {dst}: {said}");
    }
    for src in [disk, other] {
        for locks in [&[][..], &["--no-lock"]] {
            let said = fails(dir, 2, &[&["convert", src, disk, "--onto"], locks].concat());
            assert!(said.contains("while it is copied"), "{src} {locks:?}: {said}");
        }
    }
    let mut byte = [0; 4096];
    Client::connect(&uri).unwrap().read(8 * MIB, &mut byte).unwrap();
    assert_eq!(byte, [9; 4096]);
    assert!(served.terminate().success());
}

#[test]
fn without_an_nbd_socket_the_error_says_how_to_get_one() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    family(dir);
    let disk = "child-of-this-test.vhd";
    let mut served = serve(dir, &[disk, "--vhost-user", "v"]);
    let said = fails(dir, 1, &["convert", disk, "copy.raw"]);
    assert!(said.contains("give it an NBD socket: curl --unix-socket ") && said.contains("--no-lock"), "{said}");
    let (_, body) = said.split_once("--json '").unwrap();
    let (body, _) = body.split_once('\'').unwrap();
    let body = body.replace("/run/spile.nbd", &dir.join("n").display().to_string());
    let server = json(dir, &["info", disk])["served_by"]["server"].as_str().unwrap().to_owned();
    assert_eq!(ask(Path::new(&server), "POST", "/v1/exports", &body).0, 201, "{body}");
    ok(dir, &["convert", disk, "copy.raw"]);
    assert!(fs::read(dir.join("copy.raw")).unwrap()[..MIB as usize] == [7; MIB as usize]);
    // A format other than the server's is no question for the server.
    assert!(fails(dir, 1, &["info", disk, "--format", "raw"]).contains("in use"));
    served.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(served.wait().success(), "{}", rest_of_stderr(&mut served));
}

/// A server knows its disks by paths that mean the same in every folder.
#[test]
fn the_folder_does_not_matter() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir(dir.join("sub")).unwrap();
    ok(dir, &["create", "sub/one-of-this-test.raw", "--size", "1M"]);
    let served = serve(&dir.join("sub"), &["one-of-this-test.raw", "--nbd", "unix:n"]);
    let info = json(dir, &["info", "sub/one-of-this-test.raw"]);
    assert_eq!(info["served_by"]["disk"], "one-of-this-test");
    ok(dir, &["show", "sub/one-of-this-test.raw"]);
    assert!(served.terminate().success());
}

/// A name is not taken for a file that is there, nor a file for a disk that is named so.
#[test]
fn a_word_that_names_a_disk_and_another_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir(dir.join("z")).unwrap();
    for file in ["z/disk.raw", "boot-of-this-test.raw"] {
        fs::write(dir.join(file), [0; MIB as usize]).unwrap();
    }
    let size = |file: &str| fs::metadata(dir.join(file)).unwrap().len();
    let served = serve(dir, &["z/disk.raw,name=boot-of-this-test.raw", "--nbd", "unix:n"]);
    for command in [&["resize", "boot-of-this-test.raw", "2M"][..], &["accept-loss", "boot-of-this-test.raw"]] {
        let output = run(dir, command);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("./boot-of-this-test.raw"), "{command:?}: {said}");
        assert!(said.contains("--disk boot-of-this-test.raw"), "{command:?}: {said}");
    }
    assert_eq!([size("z/disk.raw"), size("boot-of-this-test.raw")], [MIB; 2]);
    ok(dir, &["resize", "./boot-of-this-test.raw", "2M"]);
    ok(dir, &["resize", "z/disk.raw", "3M"]);
    assert_eq!([size("z/disk.raw"), size("boot-of-this-test.raw")], [3 * MIB, 2 * MIB]);
    assert!(served.terminate().success());
}

/// A server at the control socket `socket` that has the disks of `list`, and fails when it is asked for more.
fn failing_server(socket: &Path, list: String, failure: String) {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let len = stream.read(&mut request).unwrap();
            let is_list = request[..len].starts_with(b"GET /v1/disks ");
            let (status, body) = if is_list { ("200 OK", &list) } else { ("500 Failed", &failure) };
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len());
            stream.write_all((head + body).as_bytes()).unwrap();
        }
    });
}

#[test]
fn the_error_of_the_server_that_is_asked_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, sockets) = (dir.path(), dir.path().join("run"));
    fs::write(dir.join("a.raw"), [0; MIB as usize]).unwrap();
    let mut command = spile();
    command.args(["serve", "a.raw", "--nbd", "unix:n"]).env("SPILE_RUN_DIR", &sockets).current_dir(dir);
    let served = Served::spawn(&mut command, dir.join("n")).unwrap();
    let listed = spile().args(["ls", "--json"]).env("SPILE_RUN_DIR", &sockets).output().unwrap();
    let mut list: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let server = list["disks"][0]["server"].as_str().unwrap().to_owned();
    let (_, mut failure) = ask(Path::new(&server), "GET", "/v1/disks/gone", "");
    failure["error"]["kind"] = "io".into();
    failure["error"]["message"] = "the store of this test fails".into();
    // Its socket is the first one, so it is the one that is asked.
    let failing = sockets.join("0.control");
    list["disks"][0]["server"] = failing.display().to_string().into();
    failing_server(&failing, list.to_string(), failure.to_string());
    for command in ["info", "map"] {
        let output = spile().args([command, "a.raw"]).env("SPILE_RUN_DIR", &sockets).current_dir(dir).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("the store of this test fails"), "{command}: {said}");
    }
    assert!(served.terminate().success());
}

/// Any server may have a disk of that name: which one is meant is not guessed.
#[test]
fn a_name_is_not_enough_while_a_server_does_not_say_which_disks_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let start = |folder: &str| {
        fs::create_dir(dir.join(folder)).unwrap();
        ok(&dir.join(folder), &["create", "twice.vhd", "--size", "8M"]);
        let mut command = spile();
        command.args(["serve", "twice.vhd", "--nbd", "unix:n"]).current_dir(dir.join(folder));
        Served::spawn(&mut command, dir.join(folder).join("n")).unwrap()
    };
    let (one, other) = (start("one"), start("other"));
    assert!(fails(dir, 2, &["snapshot", "twice", "--name", "s.vhd"]).contains("several servers"));
    one.signal(nix::sys::signal::Signal::SIGSTOP);
    for command in [&["snapshot", "twice", "--name", "s.vhd"][..], &["detach", "twice"], &["resize", "twice", "16M"]] {
        let said = fails(dir, 1, command);
        assert!(said.contains("is not known") && said.contains("other/twice.vhd"), "{command:?}: {said}");
    }
    ok(dir, &["snapshot", "other/twice.vhd", "--name", "s.vhd"]);
    one.signal(nix::sys::signal::Signal::SIGCONT);
    assert!(one.terminate().success());
    ok(dir, &["snapshot", "twice", "--name", "t.vhd"]);
    assert!(other.terminate().success());
}
