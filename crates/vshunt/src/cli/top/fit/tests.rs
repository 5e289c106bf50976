use super::*;

const COLUMNS: Columns<4> = Columns {
    titles: ["NAME", ">RATE", "NOTE", "LIST"],
    cut: &[(3, Cut::End, 6), (0, Cut::Middle, 8)],
    left_out: &[2],
};

fn row(name: &str, list: &str) -> Vec<[String; 4]> {
    vec![[name, "12.3k", "hot", list].map(str::to_owned)]
}

#[test]
fn lists_are_cut_first_and_numbers_never() {
    let cases = [
        // NAME 7 + RATE 5 + NOTE 4 + LIST 15, and three spaces.
        (34, "vm-zero vm0:0-3,vm1:0-2", [7, 5, 4, 15]),
        (33, "vm-zero vm0:0-3,vm1:0…", [7, 5, 4, 14]),
        (25, "vm-zero vm0:0…", [7, 5, 4, 6]),
        // The note is left out, so the list has its place.
        (24, "vm-zero vm0:0-3,v…", [7, 5, 0, 10]),
        (14, "vm-zero vm0:0-3,vm1:0-2", [7, 5, 0, 0]),
        (4, "v…ro vm0:0-3,vm1:0-2", [4, 0, 0, 0]),
    ];
    for (room, want, widths) in cases {
        let mut rows = row("vm-zero", "vm0:0-3,vm1:0-2");
        assert_eq!(COLUMNS.fit(&mut rows, 1, room), widths, "{room}");
        assert_eq!(format!("{} {}", rows[0][0], rows[0][3]), want, "{room}");
        assert_eq!(rows[0][1], "12.3k");
    }
}

#[test]
fn names_keep_both_ends() {
    let mut rows = row("vm-production-01:3", "-");
    assert_eq!(COLUMNS.fit(&mut rows, 1, 20), [9, 5, 0, 4]);
    assert_eq!(rows[0][0], "vm-p…01:3");
    for (width, want) in [(0, ""), (1, "…"), (2, "…3"), (3, "v…3"), (18, "vm-production-01:3")] {
        assert_eq!(cut("vm-production-01:3", width, Cut::Middle), want);
    }
    assert_eq!(cut("vm0:0,vm1:0", 6, Cut::End), "vm0:0…");
}

#[test]
fn a_program_gets_whole_cells_and_usual_tables_have_80_columns() {
    let list = "vm0:0".repeat(12);
    let text = COLUMNS.table(row("vm-zero", &list), None);
    assert_eq!(text.lines().last(), Some(format!("vm-zero 12.3k hot  {list}").as_str()));
    let text = COLUMNS.table(row("vm-zero", "vm0:0"), None);
    assert_eq!(text.lines().last(), Some("vm-zero  12.3k  hot   vm0:0"));
    let text = COLUMNS.table(row("vm-zero", &list), Some(30));
    assert_eq!(text.lines().last(), Some("vm-zero 12.3k hot  vm0:0vm0:0…"));
    assert_eq!(COLUMNS.table(row("vm\nzero", "-"), None).lines().count(), 2);
}
