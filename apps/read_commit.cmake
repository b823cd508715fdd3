# cmake -DSOURCE=<repository> -DHEAD=<first lines> -DOUT=<file> -P read_commit.cmake
# safe.directory: a clone that belongs to another user is still only read.
execute_process(
  COMMAND git -c safe.directory=* -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude *
  OUTPUT_VARIABLE commit ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
if(failed OR commit STREQUAL "")
  set(commit unknown)
endif()
file(READ ${HEAD} text)
string(APPEND text "#define K3_BUILD_COMMIT \"${commit}\"\n")
set(old "")
if(EXISTS ${OUT})
  file(READ ${OUT} old)
endif()
if(NOT old STREQUAL text)
  file(WRITE ${OUT} "${text}")
endif()
